-- uploadfree: a run has its uploads in its machine, and holds them no more.
-- KEYS: 1 run    ARGV: 1 run id, 2 token, 3 now
-- Returns {'OK'} | {'LEASE'}
-- Safe to repeat.
if not leased(load(KEYS[1]), tonumber(ARGV[2])) then return {'LEASE'} end
for id in string.gmatch(redis.call('HGET', KEYS[1], 'uploads') or '', '%S+') do
  letgo(KEYS[1], id, ARGV[1], tonumber(ARGV[3]))
end
return {'OK'}
