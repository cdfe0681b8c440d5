-- open: claim a runId, or find out who owns it.
-- Survives: a crash before the caller records anything (the same owner opens again and gets the same queue),
-- and two runs that claim one id at once (one of them learns of the other).
-- ARGV: group, new epoch, owner's UID, namespace and name, spec hash, retention of the ledger in ms (0: unlimited)
local UID, NAMESPACE, NAME, SPEC = ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local function finished(key)
  local final = redis.call('HMGET', key, 'outcome', 'total', 'succeeded', 'failed', 'retried', 'reclaimed', 'listed',
    'cursor')
  -- Older versions ended only runs that were fully listed, or did not record it.
  return { 'FINISHED', final[1] or '', final[2], final[3], final[4], final[5], final[6], final[7] or '1', final[8] or '' }
end

local past = redis.call('HMGET', LEDGER, 'spec', 'owner', 'namespace')
if past[1] then
  -- An id belongs to the namespace that used it: other namespaces must not learn its result.
  if past[3] and past[3] ~= NAMESPACE then return { 'USED' } end
  if past[1] ~= SPEC and past[2] ~= UID then return { 'USED' } end
  keep_ledger(ARGV[7])
  return finished(LEDGER)
end

local meta = redis.call('HMGET', META, 'owner', 'epoch', 'state', 'namespace', 'name', 'spec', 'takenOver')
if meta[1] and meta[1] ~= UID then return { 'TAKEN', meta[1], meta[4] or '', meta[5] or '' } end
-- A run that was created again, if it is the same run, continues where the old one stopped, or gets its outcome.
local another_run = meta[7] and meta[6] ~= SPEC
if meta[1] and meta[3] == 'closed' and not another_run then return finished(META) end
if meta[1] and not another_run and group_info() and backlog() then
  redis.call('HDEL', META, 'takenOver')
  redis.call('HSET', META, 'namespace', NAMESPACE, 'name', NAME)
  return { 'RESUMED', meta[2] }
end

-- The queue does not exist, or a part of it was lost: start again. Every client with the old epoch notices.
drop_inboxes()
redis.call('UNLINK', WORK, RETRY, DLQ, META, RESULTS)
redis.call('HSET', META, 'owner', UID, 'namespace', NAMESPACE, 'name', NAME, 'epoch', EPOCH, 'spec', SPEC,
  'state', 'open', 'cursor', '', 'listed', '0', 'total', 0, 'succeeded', 0, 'failed', 0, 'retried', 0, 'reclaimed', 0,
  'disrupted', 0)
redis.call('XGROUP', 'CREATE', WORK, GROUP, '0', 'MKSTREAM')
return { 'CREATED', EPOCH }
