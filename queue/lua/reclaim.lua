-- reclaim: settle entries of dead consumers, as disruptions that count.
-- Survives: a consumer that was only slow. The caller's judgment may be outdated, so the entry must still be
-- pending, this consumer must still hold it, and it must have been idle for as long as the caller demands, by
-- the server's clock.
-- ARGV: group, epoch, run, maximum attempts, maximum disruptions, back-off initial and maximum in ms, length of the
--       results stream, then id, consumer, least idle time in ms, reason, jitter of each entry
if lost() then return { 'LOST' } end
if closed() then return { 'CLOSED' } end

local fates = {}
for i = 9, #ARGV, 5 do
  local id, consumer, idle = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local fate = 'IGNORED'
  if #redis.call('XPENDING', WORK, GROUP, 'IDLE', idle, id, id, 1, consumer) == 1 and take(id, consumer) then
    fate = disrupt(id, consumer, true, ARGV[i + 3], '', tonumber(ARGV[i + 4]))
    counted.reclaimed = counted.reclaimed + 1
  end
  fates[#fates + 1] = fate
end
conclude()
return { 'OK', fates }
