-- pending: one page of the entries that are claimed. Consumers that cannot be pods are removed on the way, and what they
-- hold is queued again as it was: no pod of ours processed it.
-- Survives: a claimer of an older version that read under a name of a megabyte, a thousand entries at a time, which no
-- access rule could forbid. XPENDING repeats the name in every row, so it is asked for one row at a time; what the consumer holds is read
-- with XREADGROUP, which does not send the name; and no such name is ever part of the reply.
-- Workers that claim meanwhile: the first page fixes where the last one ends.
-- ARGV: group, epoch, run, where to begin ('-' or '(id'), where to end ('' on the first page), least idle time in ms, most
--       entries to return or queue again
if lost() then return { 'LOST' } end
if closed() then return { 'CLOSED' } end

-- As many as are read at once from a consumer that is removed: a page of keys of 1,024 bytes stays below a megabyte.
local SLICE = 100
local RUN, START, IDLE, LIMIT = ARGV[3], ARGV[4], ARGV[6], tonumber(ARGV[7])
-- Whatever is claimed from now on has a higher id, also what is queued again below.
local END = ARGV[5] ~= '' and ARGV[5] or group_info()['last-delivered-id']
local budget, removed = LIMIT, 0

-- A DNS subdomain, as Kubernetes demands of pods.
local function is_pod_name(name)
  return #name <= 253 and name:find('^[a-z0-9][a-z0-9.-]*$') ~= nil
end

-- As far as the budget allows; the next call goes on.
local function remove(consumer)
  while budget > 0 do
    local count = math.min(SLICE, budget)
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', count, 'STREAMS', WORK, '0')
    local entries = read and read[1] and read[1][2] or {}
    for _, entry in ipairs(entries) do
      redis.call('XACK', WORK, GROUP, entry[1])
      -- Without fields it was deleted by hand.
      if entry[2] then requeue(RUN, entry[1], fields_of(entry)) end
    end
    budget = budget - math.max(1, #entries)
    if #entries < count then
      redis.call('XGROUP', 'DELCONSUMER', WORK, GROUP, consumer)
      removed = removed + 1
      return
    end
  end
end

local claims, start, done = {}, START, false
while budget > 0 and not done do
  local row = redis.call('XPENDING', WORK, GROUP, 'IDLE', IDLE, start, END, 1)[1]
  if not row then
    done = true
  elseif is_pod_name(row[2]) then
    claims[#claims + 1] = { row[1], row[2], row[3] }
    start = '(' .. row[1]
    budget = budget - 1
  else
    remove(row[2])
  end
end

-- At the end, those that hold nothing, or have not held it long enough to be found above. Each name once.
if done then
  budget = LIMIT
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', WORK, GROUP)) do
    local name = pairs_of(consumer).name
    if not is_pod_name(name) then remove(name) end
  end
end
return { 'OK', claims, done and '' or start, END, removed }
