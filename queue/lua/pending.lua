-- pending: return one page of the claimed entries. Consumers that cannot be pods are removed along the way,
-- and their entries are queued again unchanged, because none of our pods processed them.
-- Survives: a claimer of an older version that read under a name of a megabyte, a thousand entries at a time, which
-- no access rule could forbid. XPENDING repeats the name in every row, so each call requests one row; the entries of
-- such a consumer are read with XREADGROUP, which does not send the name; and the reply never contains such a name.
-- Also, workers that claim files meanwhile: the first page fixes where the last one ends.
-- ARGV: group, epoch, run, where to begin ('-' or '(id'), where to end ('' on the first page), least idle time in ms, most
--       entries to return or queue again
if lost() then return { 'LOST' } end
if closed() then return { 'CLOSED' } end

-- The number of entries that are read at once from a removed consumer: with keys of 1,024 bytes, they stay
-- below a megabyte.
local SLICE = 100
local RUN, START, IDLE, LIMIT = ARGV[3], ARGV[4], ARGV[6], tonumber(ARGV[7])
-- Entries that are claimed from now on have higher ids, including those queued again below.
local END = ARGV[5] ~= '' and ARGV[5] or group_info()['last-delivered-id']
local budget, removed = LIMIT, 0

-- A DNS subdomain, which Kubernetes requires of pod names.
local function is_pod_name(name)
  return #name <= 253 and name:find('^[a-z0-9][a-z0-9.-]*$') ~= nil
end

-- Removes a consumer as far as the budget allows; the next call continues.
local function remove(consumer)
  while budget > 0 do
    local count = math.min(SLICE, budget)
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', count, 'STREAMS', WORK, '0')
    local entries = read and read[1] and read[1][2] or {}
    for _, entry in ipairs(entries) do
      redis.call('XACK', WORK, GROUP, entry[1])
      -- An entry without fields was deleted by hand.
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

-- At the end, remove the consumers that hold nothing, or whose entries have not been idle long enough to be
-- found above. Each name occurs once.
if done then
  budget = LIMIT
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', WORK, GROUP)) do
    local name = pairs_of(consumer).name
    if not is_pod_name(name) then remove(name) end
  end
end
return { 'OK', claims, done and '' or start, END, removed }
