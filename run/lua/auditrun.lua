-- auditrun: everything about one run's money, as of one moment.
-- KEYS: 1 run, 2 calls, 3 queue, 4 active, 5 ledger, 6 leases, 7 parked    ARGV: 1 run id
-- Returns {'OK', record, calls, ledger entry ('': none), '1' in the queue or parked, '1' among the active, '1' leased} | {'NOTFOUND', ledger entry}
local entry = redis.call('HGET', KEYS[5], 'c:' .. ARGV[1]) or ''
if redis.call('EXISTS', KEYS[1]) == 0 then return {'NOTFOUND', entry} end
return {'OK', redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), entry,
  (redis.call('ZSCORE', KEYS[3], ARGV[1]) or redis.call('ZSCORE', KEYS[7], ARGV[1])) and '1' or '0', tostring(redis.call('SISMEMBER', KEYS[4], ARGV[1])),
  redis.call('ZSCORE', KEYS[6], ARGV[1]) and '1' or '0'}
