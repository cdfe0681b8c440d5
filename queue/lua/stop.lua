-- stop: tell pods to finish their current file and end, by an entry in their inboxes.
-- Survives: a lost reply or inbox, because the call is repeated until the pods have ended. It also works on a full
-- server, because pods that end free memory.
-- ARGV: group, epoch, field of the entry, lifetime of an inbox without files in ms, then pods
if lost() then return { 'LOST' } end

-- The call is repeated; one entry is enough.
local ENTRIES_MAX = 1000

for i = 5, #ARGV do
  local inbox = inbox_of(ARGV[i])
  redis.call('XADD', inbox, 'MAXLEN', '~', ENTRIES_MAX, '*', ARGV[3], 1)
  -- The inbox of a pod that holds files already lives longer.
  redis.call('PEXPIRE', inbox, ARGV[4], 'NX')
end
return { 'OK' }
