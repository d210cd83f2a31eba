-- put: writes one piece of a large result stream ahead of settle. The stream expires unless settle adopts it.
-- KEYS: 1 run, 2 stream    ARGV: 1 token, 2 offset, 3 bytes, 4 lifetime (ms)
-- Returns {'OK'} | {'LEASE'}
-- Safe to repeat: a piece has its place.
if not leased(load(KEYS[1]), tonumber(ARGV[1])) then return {'LEASE'} end
if ARGV[2] == '0' then redis.call('DEL', KEYS[2]) end
redis.call('SETRANGE', KEYS[2], ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {'OK'}
