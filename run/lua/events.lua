-- events: one page of a run's stored events. It changes nothing.
-- KEYS: 1 run, 2 events
-- ARGV: 1 org ('': any), 2 number of the last event that the caller has, 3 most events, 4 bytes after which the page ends
-- Returns {'OK', '1' (more follow) or '0', events} | {'NOTFOUND'}
local org = redis.call('HGET', KEYS[1], 'org')
if not org or (ARGV[1] ~= '' and org ~= ARGV[1]) then return {'NOTFOUND'} end
local from, most, bytes = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local page, size, at = {}, 0, from
while #page < most and size < bytes do
  local some = redis.call('LRANGE', KEYS[2], int(at), int(at + 15))
  if #some == 0 then break end
  for _, event in ipairs(some) do
    if #page == most or size >= bytes then break end
    page[#page + 1] = event
    size = size + #event
    at = at + 1
  end
end
local more = redis.call('LLEN', KEYS[2]) > at
return {'OK', more and '1' or '0', page}
