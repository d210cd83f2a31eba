-- key: stores an API key under the SHA-256 of its secret.
-- KEYS: 1 secret, 2 key, 3 keys (index), 4 org, 5 members of the org, 6 keys of the member
-- ARGV: 1 id, 2 org ('': none), 3 name, 4 role, 5 now, 6 SHA-256, 7 when it expires (0: never), 8 member ('': none)
-- Returns {'OK'} | {'NOTFOUND'} (no such org or member)
-- Safe to repeat: the id and the secret are made once by the caller.
if ARGV[2] ~= '' and redis.call('EXISTS', KEYS[4]) == 0 then return {'NOTFOUND'} end
if ARGV[8] ~= '' and redis.call('HEXISTS', KEYS[5], ARGV[8]) == 0 then return {'NOTFOUND'} end
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'org', ARGV[2], 'name', ARGV[3], 'role', ARGV[4], 'created_us', ARGV[5])
if ARGV[7] ~= '0' then redis.call('HSET', KEYS[1], 'expires_us', ARGV[7]) end
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[1], 'member', ARGV[8])
  redis.call('SADD', KEYS[6], ARGV[6])
end
redis.call('SET', KEYS[2], ARGV[6])
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[1])
return {'OK'}
