-- recover: queue entries again that were handed out and have no holder.
-- Survives: a reader with NOACK, run by hand or by a claimer of an older version. Its entries count as
-- waiting, but would never be handed out again. Settled entries are deleted, so every entry up to the last
-- delivered one that is not pending is such an entry. Also, such a reader that continues meanwhile: the first
-- page fixes where the last one ends.
-- ARGV: group, epoch, run, where to begin ('-' or '(id'), where to end ('' on the first page), most entries to check
if lost() then return { 'LOST' } end
if closed() then return { 'CLOSED' } end

local END = ARGV[5] ~= '' and ARGV[5] or group_info()['last-delivered-id']
local entries = redis.call('XRANGE', WORK, ARGV[4], END, 'COUNT', ARGV[6])
local recovered = 0
for _, entry in ipairs(entries) do
  if #redis.call('XPENDING', WORK, GROUP, entry[1], entry[1], 1) == 0 then
    requeue(ARGV[3], entry[1], fields_of(entry))
    recovered = recovered + 1
  end
end
if recovered > 0 then redis.call('HINCRBY', META, 'reclaimed', recovered) end
local more = #entries == tonumber(ARGV[6])
return { 'OK', recovered, more and entries[#entries][1] or '', END }
