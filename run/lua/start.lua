-- start: starting -> running, with the event microvm.ready.
-- KEYS: 1 run, 2 events
-- ARGV: 1 events channel, 2 run id, 3 token, 4 at, 5 machine, 6 image, 7 isolation, 8 data of the event
-- Returns {'OK'} | {'LEASE'} | {'STATE', state} (e.g. running: another machine was confirmed already)
-- Safe to repeat: by the state and the machine.
local r = load(KEYS[1])
if not leased(r, tonumber(ARGV[3])) then return {'LEASE'} end
if r.state == 'running' then
  if redis.call('HGET', KEYS[1], 'machine') == ARGV[5] then return {'OK'} end
  return {'STATE', r.state}
end
if not legal[r.state].running then return {'STATE', r.state} end
emit(KEYS[2], ARGV[1], ARGV[2], r, 'microvm.ready', tonumber(ARGV[4]), ARGV[8], '')
redis.call('HSET', KEYS[1], 'state', 'running', 'started_us', int(r.at), 'at_us', int(r.at), 'seq', int(r.seq),
  'machine', ARGV[5], 'image', ARGV[6], 'isolation', ARGV[7])
return {'OK'}
