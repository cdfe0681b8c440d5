-- settle: decide the fate of entries whose attempt has ended.
-- Survives: a crash between acknowledging a file and queueing it again (the file would be lost) or the other way round
-- (it would be there twice); a result that is reported twice, or late, after the entry was reclaimed: only the caller
-- whose acknowledgement removed the pending entry counts.
-- ARGV: group, epoch, run, maximum attempts, back-off initial and maximum in ms, length of the results stream,
--       then id, consumer, verdict (succeeded, failed, rejected, released) of each entry, and after failed and rejected
--       reason, exit code, jitter
if lost() then return { 'LOST' } end

local call = redis.call
local fates = {}
local i = 8
while i <= #ARGV do
  local id, consumer, verdict = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local failure = verdict == 'failed' or verdict == 'rejected'
  local fate
  if call('XACK', WORK, GROUP, id) == 0 then
    fate = 'IGNORED'
  else
    if failure then
      fate = fail(id, consumer, verdict == 'failed', ARGV[i + 3], ARGV[i + 4], tonumber(ARGV[i + 5]))
    elseif verdict == 'released' then
      fate = release(id)
    else
      local entry = RESULTS_MAX > 0 and call('XRANGE', WORK, id, id)[1]
      if entry then
        local message = fields_of(entry)
        record(message.file, tonumber(message.attempts) + 1, 'succeeded')
      end
      call('XDEL', WORK, id)
      counted.succeeded = counted.succeeded + 1
      fate = 'SUCCEEDED'
    end
    forget_idle(consumer)
  end
  fates[#fates + 1] = fate
  i = i + (failure and 6 or 3)
end
publish_counts()
return { 'OK', fates }
