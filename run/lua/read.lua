-- read: a run's record and, while it waits, its place in line. It changes nothing.
-- KEYS: 1 run, 2 org, 3 queue, 4 parked, 5 active, 6 leases, 7 ring
-- ARGV: 1 run id, 2 org, 3 now, 4 default concurrency
-- Returns {'OK', readrun() (empty: there is none), place (1: the next of its organisation; 0: it does not wait, or is
--         another organisation's), microseconds until its turn (-1: not known)}
local run, org, queue, parked, active, leases, ring = unpack(KEYS)
local r = readrun(run)
if r[1] ~= 'queued' or r[2] ~= ARGV[2] then return {'OK', r, '0', '-1'} end
local k = {org = org, queue = queue, parked = parked, active = active, leases = leases, ring = ring}
local place, wait = standing(k, ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[3]))
return {'OK', r, place, wait}
