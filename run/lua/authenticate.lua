-- authenticate: reads an API key and counts the request against its rate (generic cell rate algorithm), in one round trip.
-- KEYS: 1 secret, 2 rate (microseconds: the theoretical arrival time of the next request)
-- ARGV: 1 microseconds between two requests at the full rate, 2 microseconds by which requests may run ahead of it
-- Returns {'OK', key, ahead} | {'LIMITED', key, ahead, wait}: how far the requests are ahead now and, where that is too
--         far, how long to wait; in microseconds. The key is empty when there is none with this secret.
-- The time is Redis's own: gateways whose clocks differ must not limit each other. The rate is in memory only, neither in
-- the append-only file nor on replicas, and a Redis that refuses writes still lets requests in.
local key = redis.call('HGETALL', KEYS[1])
if #key == 0 then return {'OK', key, '0'} end
local interval, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000000 + tonumber(t[2])
local next = math.max(num(redis.call('GET', KEYS[2])), now) + interval
if next - now > most then return {'LIMITED', key, int(next - interval - now), int(next - now - most)} end
redis.set_repl(redis.REPL_NONE)
redis.pcall('SET', KEYS[2], int(next), 'PX', int(math.ceil((next - now) / 1000)))
redis.set_repl(redis.REPL_ALL)
return {'OK', key, int(next - now)}
