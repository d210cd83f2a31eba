-- imagesorg: sets the images that an organisation's runs may use.
-- KEYS: 1 org    ARGV: 1 names with commas between them ('': any)
-- Returns {'OK'} | {'NOTFOUND'}
-- Safe to repeat.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'NOTFOUND'} end
redis.call('HSET', KEYS[1], 'images', ARGV[1])
return {'OK'}
