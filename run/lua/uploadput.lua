-- uploadput: writes one piece of an upload. Under zero data retention it is in memory only: neither in the append-only file nor
-- on a replica.
-- KEYS: 1 upload, 2 content
-- ARGV: 1 offset, 2 bytes, 3 lifetime unless it goes on (ms), 4 now, 5 upload id
-- Returns {'OK'} | {'NOTFOUND'} (it took too long) | {'RANGE'} (more bytes than it may have)
-- Safe to repeat: a piece has its place.
local v = redis.call('HMGET', KEYS[1], 'state', 'size', 'zdr', 'org')
if v[1] ~= 'open' then return {'NOTFOUND'} end
if tonumber(ARGV[1]) + #ARGV[2] > tonumber(v[2]) then return {'RANGE'} end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local till = tonumber(ARGV[4]) + 1000 * tonumber(ARGV[3])
book(KEYS[1], v[4], ARGV[5], tonumber(v[2]), till)
if v[3] == '1' then
  redis.call('ZADD', string.match(KEYS[1], '^{[^}]*}:') .. 'uploads', int(math.floor(till / 1000)), ARGV[5])
  redis.set_repl(redis.REPL_NONE)
end
redis.call('SETRANGE', KEYS[2], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {'OK'}
