-- upload: begins an upload, whose bytes are counted to the organisation from now on.
-- KEYS: 1 upload, 2 org
-- ARGV: 1 upload id, 2 org id, 3 most bytes that it may have, 4 '1' zero data retention, 5 now, 6 lifetime unless it goes on (ms),
--       7 bytes and 8 number of uploads that the organisation may have
-- Returns {'OK'} | {'NOTFOUND'} (no such org) | {'FULLUP', when there will be room (ms from now; -1: not known)}
-- Safe to repeat: by the upload id, which the caller makes once.
local upload, org, now = KEYS[1], KEYS[2], tonumber(ARGV[5])
if redis.call('EXISTS', org) == 0 then return {'NOTFOUND'} end
if redis.call('EXISTS', upload) == 1 then return {'OK'} end
local all, bytes = bookkeys(upload, ARGV[2])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', int(math.floor(now / 1000)), 'LIMIT', 0, 100)) do
  local id, size = string.match(old, '^(%S+) (%d+)$')
  unbook(upload, ARGV[2], id, tonumber(size))
end
if redis.call('ZCARD', all) >= tonumber(ARGV[8]) or num(redis.call('GET', bytes)) + tonumber(ARGV[3]) > tonumber(ARGV[7]) then
  local first = redis.call('ZRANGE', all, 0, 0, 'WITHSCORES')[2]
  if not first or first == 'inf' then return {'FULLUP', -1} end
  return {'FULLUP', int(math.max(tonumber(first) - math.floor(now / 1000), 1))}
end
redis.call('HSET', upload, 'org', ARGV[2], 'state', 'open', 'size', ARGV[3], 'zdr', ARGV[4])
redis.call('PEXPIRE', upload, ARGV[6])
book(upload, ARGV[2], ARGV[1], tonumber(ARGV[3]), now + 1000 * tonumber(ARGV[6]))
if ARGV[4] == '1' then
  redis.call('HSET', upload, 'once', '1', 'snapshots', int((snapshots())))
  redis.call('ZADD', string.match(upload, '^{[^}]*}:') .. 'uploads', int(math.floor(now / 1000) + tonumber(ARGV[6])), ARGV[1])
end
return {'OK'}
