-- capture: turns what a call had reserved into what it cost; the rest is free for other calls of the run again.
-- With amount 0 and state 'v' it is void: the call gives everything back.
-- The capture with which 90 percent of the hold are charged appends the event budget.warning, once.
-- KEYS: 1 run, 2 calls, 3 events
-- ARGV: 1 token, 2 call id, 3 amount, 4 state to reach ('c' captured, 'v' void), 5 events channel, 6 run id, 7 now
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
local charged, pending = r.charged + amount, r.pending - granted
if amount > 0 and not r.warned and charged >= r.reserved - math.floor(r.reserved / 10) then
  emit(KEYS[3], ARGV[5], ARGV[6], r, 'budget.warning', tonumber(ARGV[7]), '{"reserved_micros":' .. int(r.reserved)
    .. ',"charged_micros":' .. int(charged) .. ',"pending_micros":' .. int(pending) .. '}', '')
  redis.call('HSET', KEYS[1], 'warned', '1', 'at_us', int(r.at), 'seq', int(r.seq))
end
return {'OK'}
