-- limitorg: sets the limits of an organisation.
-- KEYS: 1 org, 2 queue, 3 active, 4 ring
-- ARGV: 1 org id, 2 concurrency and 3 queue limit (0: the default), 4 default concurrency, 5 work channel
-- Returns {'OK'} | {'NOTFOUND'}
-- Safe to repeat.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'NOTFOUND'} end
redis.call('HSET', KEYS[1], 'concurrency', ARGV[2], 'queue_limit', ARGV[3])
relist(KEYS[2], KEYS[3], KEYS[1], KEYS[4], ARGV[1], tonumber(ARGV[4]), ARGV[5])
return {'OK'}
