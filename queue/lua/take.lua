-- take: settle files that workers report as succeeded, and return all other final reports to the caller, who decides.
-- Survives: a report that is repeated, late, forged or invalid: only the consumer that holds an entry is
-- believed, and reports about any other entry are dropped. Also, a worker that writes without limit: the hash
-- is measured before it is read, and dropped if it is larger than the reports of all pods of the run can be;
-- honest workers repeat theirs.
-- ARGV: group, epoch, run, maximum attempts, maximum disruptions, back-off initial and maximum in ms, length of the
--       results stream, cursor, most reports, most bytes
if lost() then return { 'LOST' } end
if closed() then return { 'CLOSED' } end

-- The number of reports per call.
local BATCH = 500
local CURSOR, REPORTS_MAX, BYTES_MAX = ARGV[9], tonumber(ARGV[10]), tonumber(ARGV[11])

if redis.call('HLEN', STATES) > REPORTS_MAX
  or (redis.call('MEMORY', 'USAGE', STATES, 'SAMPLES', 0) or 0) > BYTES_MAX then
  redis.call('UNLINK', STATES)
  return { 'FLOODED' }
end

-- How long ago this consumer got the entry, in ms, if it holds it.
local function held_for(consumer, id)
  -- The id comes from a worker and may be invalid.
  local row = redis.pcall('XPENDING', WORK, GROUP, id, id, 1, consumer)
  if not row.err and #row == 1 and row[1][1] == id then return row[1][3] end
end

-- States of a file that was fetched.
local FETCHED = { started = true, succeeded = true, filter = true, publish = true }

local reports, served, dropped, fetched = {}, {}, {}, nil
local function look_at(id, report)
  local consumer, state = report:match('^(%S+) (%S+)')
  local held = state and held_for(consumer, id)
  if not held then
    dropped[#dropped + 1] = id
    return
  end
  if FETCHED[state] then fetched = math.min(fetched or held, held) end
  if state == 'succeeded' and take(id, consumer) then
    succeed(id)
    served[consumer] = true
  elseif state ~= 'started' then
    reports[#reports + 1] = { id, report }
  end
end

local scanned = redis.call('HSCAN', STATES, CURSOR, 'COUNT', BATCH)
for i = 1, #scanned[2], 2 do look_at(scanned[2][i], scanned[2][i + 1]) end
if #dropped > 0 then redis.call('HDEL', STATES, unpack(dropped)) end
local canary = conclude()

local consumers = {}
for consumer in pairs(served) do consumers[#consumers + 1] = consumer end
return { 'OK', scanned[1], counted.succeeded, consumers, reports, canary or '', fetched or -1 }
