-- uploaddrop: removes an upload, one that is being received or a whole one that no run holds.
-- KEYS: 1 upload, 2 holders    ARGV: 1 upload id, 2 org that it must belong to, 3 state that it must be in ('open' or 'whole')
-- Returns {'OK'} | {'NOTFOUND'} | {'STATE'} (a run that has not started holds it)
-- Safe to repeat.
local v = redis.call('HMGET', KEYS[1], 'org', 'state')
if v[1] ~= ARGV[2] or v[2] ~= ARGV[3] then return {'NOTFOUND'} end
if redis.call('SCARD', KEYS[2]) > 0 then return {'STATE'} end
discard(KEYS[1], ARGV[1], v[2] == 'whole')
return {'OK'}
