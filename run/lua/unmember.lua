-- unmember: removes a member and revokes all of its keys, in one step: a key can be made before or not at all.
-- KEYS: 1 members, 2 keys of the member
-- ARGV: 1 id, 2 now, 3 prefix and 4 suffix of a secret's key, 5 revocation channel, 6 org
-- Returns {'OK'} | {'NOTFOUND'} (no such member)
-- Safe to repeat: what is revoked stays revoked as it was.
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return {'NOTFOUND'} end
for _, sum in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  redis.call('HSETNX', ARGV[3] .. sum .. ARGV[4], 'revoked_us', ARGV[2])
end
redis.call('DEL', KEYS[2])
redis.call('PUBLISH', ARGV[5], ARGV[6])
return {'OK'}
