-- capture: turns what a call had reserved into what it cost; the rest is free for other calls of the run again.
-- With amount 0 and state 'v' it is void: the call gives everything back.
-- KEYS: 1 run, 2 calls
-- ARGV: 1 token, 2 call id, 3 amount, 4 state to reach ('c' captured, 'v' void)
-- Returns {'OK'} | {'LEASE'} | {'NOTFOUND'} (no such call) | {'RANGE', granted} | {'STATE', what the call became}
-- Safe to repeat with the same amount, also after the run has ended: by the call id.
local amount, target = tonumber(ARGV[3]), ARGV[4]
local r = load(KEYS[1])
if not r or r.token ~= tonumber(ARGV[1]) then return {'LEASE'} end
local call = redis.call('HGET', KEYS[2], ARGV[2])
if not call then
  if not leased(r, r.token) then return {'LEASE'} end
  return {'NOTFOUND'}
end
local state, kind, granted, captured = string.match(call, '^(%a) (%a+) (%d+) (%d+)$')
granted = tonumber(granted)
if state ~= 'p' then
  if state == target and tonumber(captured) == amount then return {'OK'} end
  return {'STATE', state}
end
if not leased(r, r.token) then return {'LEASE'} end
if amount > granted then return {'RANGE', int(granted)} end
redis.call('HSET', KEYS[2], ARGV[2], target .. ' ' .. kind .. ' ' .. int(granted) .. ' ' .. int(amount))
redis.call('HSET', KEYS[1], 'pending', int(r.pending - granted), 'charged', int(r.charged + amount),
  kind, int(r[kind] + amount))
return {'OK'}
