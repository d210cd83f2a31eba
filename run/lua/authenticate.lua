-- authenticate: reads an API key and counts requests against its rate (generic cell rate algorithm), in one round trip.
-- KEYS: 1 secret, 2 rate (microseconds: the theoretical arrival time of the next request)
-- ARGV: 1 microseconds between two requests at the full rate, 2 microseconds by which requests may run before it,
--       3 how many requests there are now
-- Returns {'OK', key, how many of the requests are let in, microseconds by which those before them ran before the rate}. The
--         key is empty when there is none with this secret. The i-th that is let in runs i times ARGV[1] further before it.
-- The time is Redis's own: gateways whose clocks differ must not limit each other. The rate is in memory only, neither in
-- the append-only file nor on replicas, and a Redis that refuses writes still lets requests in.
local key = redis.call('HGETALL', KEYS[1])
if #key == 0 then return {'OK', key, '0', '0'} end
local interval, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000000 + tonumber(t[2])
local first = math.max(num(redis.call('GET', KEYS[2])), now)
local granted = math.max(0, math.min(tonumber(ARGV[3]), math.floor((most - (first - now)) / interval)))
if granted > 0 then
  local next = first + granted * interval
  redis.set_repl(redis.REPL_NONE)
  redis.pcall('SET', KEYS[2], int(next), 'PX', int(math.ceil((next - now) / 1000)))
  redis.set_repl(redis.REPL_ALL)
end
return {'OK', key, int(granted), int(first - now)}
