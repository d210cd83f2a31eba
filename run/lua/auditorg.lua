-- auditorg: one organisation's account and open holds, as of one moment.
-- KEYS: 1 org, 2 queue, 3 active, 4 ledger, 5 entries, 6 parked    ARGV: 1 prefix and 2 suffix of a run's key
-- Returns {'OK', balance, held, deposits, charged, entries, open holds, their sum, entries in the ledger by name, and in
--         order} | {'NOTFOUND'}
local o = redis.call('HMGET', KEYS[1], 'balance', 'held', 'deposits', 'charged', 'entries')
if not o[1] then return {'NOTFOUND'} end
local count, sum = 0, 0
local function add(ids)
  for _, id in ipairs(ids) do
    local v = redis.call('HMGET', ARGV[1] .. id .. ARGV[2], 'state', 'reserved')
    if v[1] and not terminal[v[1]] then
      count, sum = count + 1, sum + num(v[2])
    end
  end
end
add(redis.call('ZRANGE', KEYS[2], 0, -1))
add(redis.call('ZRANGE', KEYS[6], 0, -1))
add(redis.call('SMEMBERS', KEYS[3]))
return {'OK', o[1], o[2] or '', o[3] or '', o[4] or '', o[5] or '', int(count), int(sum),
  int(redis.call('HLEN', KEYS[4])), int(redis.call('LLEN', KEYS[5]))}
