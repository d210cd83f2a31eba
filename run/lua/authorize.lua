-- authorize: reserves the worst case of one call inside the hold, or refuses.
-- KEYS: 1 run, 2 calls
-- ARGV: 1 token, 2 call id, 3 kind (model, web or compute), 4 least, 5 most, 6 most calls a run may make,
--       7 to leave free where the least allows it
-- Returns {'OK', granted} | {'LEASE'} | {'BUDGET'} | {'STATE', what the call became}
-- Safe to repeat while the call is unfinished: by the call id.
local r = load(KEYS[1])
if not leased(r, tonumber(ARGV[1])) then return {'LEASE'} end
local call = redis.call('HGET', KEYS[2], ARGV[2])
if call then
  local state, kind, granted = string.match(call, '^(%a) (%a+) (%d+) %d+$')
  if state == 'p' and kind == ARGV[3] then return {'OK', granted} end
  return {'STATE', state}
end
local free = r.reserved - r.charged - r.pending
local granted = math.min(free, tonumber(ARGV[5]), math.max(free - tonumber(ARGV[7]), tonumber(ARGV[4])))
if granted < tonumber(ARGV[4]) or redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[6]) then return {'BUDGET'} end
redis.call('HSET', KEYS[2], ARGV[2], 'p ' .. ARGV[3] .. ' ' .. int(granted) .. ' 0')
redis.call('HSET', KEYS[1], 'pending', int(r.pending + granted))
return {'OK', int(granted)}
