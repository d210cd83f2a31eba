-- erase: removes the content of an ended run, and its uploads as soon as no run holds them; states, times and money stay until retention ends.
-- KEYS: 1 run, 2 events, 3 spec, 4 output, 5 stdout, 6 stderr, 7 left, 8 content, 9 due, 10 stain
-- ARGV: 1 run id, 2 org the run must belong to, 3 request and 4 outcome without content, then the events without content
-- Returns {'OK'} | {'NOTFOUND'} | {'STATE', state} | {'AGAIN'} (the events have changed: read them again)
-- Safe to repeat.
local r = load(KEYS[1])
if not r or r.org ~= ARGV[2] then return {'NOTFOUND'} end
if not terminal[r.state] then return {'STATE', r.state} end
redis.call('ZREM', KEYS[9], ARGV[1])
if redis.call('HGET', KEYS[1], 'erased') then return {'OK'} end
if redis.call('LLEN', KEYS[2]) ~= #ARGV - 4 then return {'AGAIN'} end
local ttl = redis.call('PTTL', KEYS[2])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
for i = 5, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
if ttl > 0 then redis.call('PEXPIRE', KEYS[2], ttl) end
for id in string.gmatch(redis.call('HGET', KEYS[1], 'uploads') or '', '%S+') do
  local upload, _, holders = uploadkeys(KEYS[1], id)
  if redis.call('SCARD', holders) > 0 then
    redis.call('HSET', upload, 'once', '1')
  else
    discard(KEYS[1], id, true)
  end
end
redis.call('HDEL', KEYS[1], 'split', 'uploads')
redis.call('HSET', KEYS[1], 'request', ARGV[3], 'outcome', ARGV[4], 'erased', '1')
-- The append-only file, and a snapshot, still have it: another must replace them.
if not r.zdr then redis.call('SET', KEYS[10], '1') end
return {'OK'}
