-- org: makes an organisation with an empty account.
-- KEYS: 1 org, 2 orgs (index), 3 turn    ARGV: 1 id, 2 name, 3 concurrency, 4 now
-- Returns {'OK'} | {'EXISTS'} (made with another name or limit)
-- Safe to repeat: the same organisation again is no error, also when its limits have changed since.
local o = redis.call('HMGET', KEYS[1], 'name', 'first_concurrency')
if o[1] then
  if o[1] == ARGV[2] and o[2] == ARGV[3] then return {'OK'} end
  return {'EXISTS'}
end
redis.call('HSET', KEYS[1], 'name', ARGV[2], 'concurrency', ARGV[3], 'first_concurrency', ARGV[3], 'created_us', ARGV[4], 'balance', '0',
  'held', '0', 'deposits', '0', 'charged', '0', 'entries', '0', 'turn', int(redis.call('INCR', KEYS[3])))
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
return {'OK'}
