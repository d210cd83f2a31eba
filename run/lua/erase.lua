-- erase: removes the content of an ended run; states, times and money stay until retention ends.
-- KEYS: 1 run, 2 events, 3 spec, 4 output, 5 stdout, 6 stderr
-- ARGV: 1 org the run must belong to, 2 request and 3 outcome without content, then the events without content
-- Returns {'OK'} | {'NOTFOUND'} | {'STATE', state} | {'AGAIN'} (the events have changed: read them again)
-- Safe to repeat.
local r = load(KEYS[1])
if not r or r.org ~= ARGV[1] then return {'NOTFOUND'} end
if not terminal[r.state] then return {'STATE', r.state} end
if redis.call('LLEN', KEYS[2]) ~= #ARGV - 3 then return {'AGAIN'} end
local ttl = redis.call('PTTL', KEYS[2])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
for i = 4, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
if ttl > 0 then redis.call('PEXPIRE', KEYS[2], ttl) end
redis.call('HDEL', KEYS[1], 'split')
redis.call('HSET', KEYS[1], 'request', ARGV[2], 'outcome', ARGV[3], 'erased', '1')
return {'OK'}
