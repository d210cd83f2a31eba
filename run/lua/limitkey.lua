-- limitkey: sets the limits of an API key, and lets in what they allow.
-- KEYS: 1 limits, 2 parked of the key, 3 parked, 4 org, 5 queue, 6 active, 7 ring
-- ARGV: 1 org id, 2 concurrency and 3 queue limit (0: none), 4 default concurrency, 5 work channel
-- Returns {'OK'}
-- Safe to repeat.
redis.call('HSET', KEYS[1], 'concurrency', ARGV[2], 'queue', ARGV[3])
promote(KEYS[1], KEYS[2], KEYS[3], KEYS[5])
relist(KEYS[5], KEYS[6], KEYS[4], KEYS[7], ARGV[1], tonumber(ARGV[4]), ARGV[5])
return {'OK'}
