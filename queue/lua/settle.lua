-- settle: decide the fate of entries whose attempt has ended.
-- Survives: a crash between acknowledging a file and queueing it again (which would lose or duplicate the
-- file, depending on the order), and a result that is reported twice, late, or for an entry that another
-- consumer now holds: a report counts only if its consumer still holds the entry, and only once.
-- ARGV: group, epoch, run, maximum attempts, maximum disruptions, back-off initial and maximum in ms, length of the
--       results stream, then id, consumer, verdict (succeeded, failed, rejected, disrupted, interrupted, released) of
--       each entry, and after failed, rejected, disrupted and interrupted (a disruption that does not count) reason,
--       exit code, jitter
if lost() then return { 'LOST' } end

local explained = { failed = true, rejected = true, disrupted = true, interrupted = true }

local function fate_of(id, consumer, verdict, reason, exit_code, jitter)
  if not take(id, consumer) then return 'IGNORED' end
  if verdict == 'succeeded' then return succeed(id) end
  if verdict == 'released' then return release(id) end
  if verdict == 'disrupted' or verdict == 'interrupted' then
    return disrupt(id, consumer, verdict == 'disrupted', reason, exit_code, tonumber(jitter))
  end
  return fail(id, consumer, verdict == 'failed', reason, exit_code, tonumber(jitter))
end

local fates = {}
local i = 9
while i <= #ARGV do
  fates[#fates + 1] = fate_of(unpack(ARGV, i, i + 5))
  i = i + (explained[ARGV[i + 2]] and 6 or 3)
end
conclude()
return { 'OK', fates }
