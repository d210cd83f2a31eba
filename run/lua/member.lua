-- member: adds a member to an organisation.
-- KEYS: 1 org, 2 members    ARGV: 1 id, 2 member as JSON, 3 most members
-- Returns {'OK'} | {'NOTFOUND'} (no such org) | {'FULL'}
-- Safe to repeat: the id is made once by the caller.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'NOTFOUND'} end
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[3]) then return {'FULL'} end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return {'OK'}
