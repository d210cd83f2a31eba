-- key: stores an API key under the SHA-256 of its secret.
-- KEYS: 1 secret, 2 key, 3 keys (index), 4 org    ARGV: 1 id, 2 org ('': none), 3 name, 4 role, 5 now, 6 SHA-256
-- Returns {'OK'} | {'NOTFOUND'} (no such org)
-- Safe to repeat: the id and the secret are made once by the caller.
if ARGV[2] ~= '' and redis.call('EXISTS', KEYS[4]) == 0 then return {'NOTFOUND'} end
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'org', ARGV[2], 'name', ARGV[3], 'role', ARGV[4], 'created_us', ARGV[5])
redis.call('SET', KEYS[2], ARGV[6])
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[1])
return {'OK'}
