-- open: claim a runId, or find out whose it is.
-- Survives: a crash after it and before its caller wrote anything down (the same owner opens again and gets the same
-- queue), and two runs that claim one id at once (one of them is told of the other).
-- ARGV: group, new epoch, owner, spec hash
local OWNER, SPEC = ARGV[3], ARGV[4]

local function finished(key)
  local final = redis.call('HMGET', key, 'outcome', 'total', 'succeeded', 'failed', 'retried', 'reclaimed')
  return { 'FINISHED', final[1] or '', final[2], final[3], final[4], final[5], final[6] }
end

local past = redis.call('HMGET', LEDGER, 'spec', 'owner')
if past[1] then
  if past[1] ~= SPEC and past[2] ~= OWNER then return { 'USED' } end
  return finished(LEDGER)
end

local meta = redis.call('HMGET', META, 'owner', 'epoch', 'state')
if meta[1] and meta[1] ~= OWNER then return { 'TAKEN', meta[1] } end
if meta[1] and meta[3] == 'closed' then return finished(META) end
if meta[1] and group_exists() and backlog() then return { 'RESUMED', meta[2] } end

-- Nothing is there, or a part of it was lost: begin anew. The new epoch tells everybody who knew the old one.
redis.call('UNLINK', WORK, RETRY, DLQ, META, RESULTS)
redis.call('HSET', META, 'owner', OWNER, 'epoch', EPOCH, 'spec', SPEC, 'state', 'open', 'cursor', '', 'listed', '0',
  'total', 0, 'succeeded', 0, 'failed', 0, 'retried', 0, 'reclaimed', 0)
redis.call('XGROUP', 'CREATE', WORK, GROUP, '0', 'MKSTREAM')
return { 'CREATED', EPOCH }
