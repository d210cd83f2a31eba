-- place: where a waiting run stands and when it gets its turn. It changes nothing.
-- KEYS: those of closing()
-- ARGV: 1 run id, 2 org, 3 now, 4 default concurrency
-- Returns {'OK', place (1: the next of its organisation), microseconds until its turn (-1: not known)} | {'GONE'} (it does
--         not wait)
local k = closing(KEYS)
local own = num(redis.call('HGET', k.org, 'concurrency'))
local limit = own > 0 and own or tonumber(ARGV[4])
local place = redis.call('ZRANK', k.queue, ARGV[1])
if not place then
  place = redis.call('ZRANK', k.parked, ARGV[1])
  if not place then return {'GONE'} end
  place = place + redis.call('ZCARD', k.queue)
end
return {'OK', int(place + 1), int(awaited(k, ARGV[2], place + 1, limit, tonumber(ARGV[3])))}
