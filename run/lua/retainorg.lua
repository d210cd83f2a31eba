-- retainorg: sets how long the content of an organisation's runs is kept.
-- KEYS: 1 org    ARGV: 1 milliseconds (0: as long as the record)
-- Returns {'OK'} | {'NOTFOUND'}
-- Safe to repeat.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'NOTFOUND'} end
redis.call('HSET', KEYS[1], 'retention_ms', ARGV[1])
return {'OK'}
