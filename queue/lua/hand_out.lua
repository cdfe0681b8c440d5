-- hand_out: give each of these pods files until it holds as many as it may. The files go into the pod's inbox. A
-- worker can read nothing else: it can neither take files itself nor choose the name under which it holds them.
-- Survives: a crash or lost reply (a pod that holds files keeps them, and finds them in its inbox again), two
-- operators that serve the same pod at once, and an inbox that was lost or left behind by an earlier queue.
-- ARGV: group, epoch, most files that a pod holds, then pods
if lost() then return { 'LOST' } end
if closed() then return { 'CLOSED' } end
-- Nothing is handed out during an abort.
if redis.call('HGET', META, 'state') ~= 'open' then return { 'OK', {} } end

-- Inboxes of a lost queue expire. No claimer restarts after this long.
local INBOX_LIFETIME = 7 * 24 * 3600 * 1000
-- More than any pod holds.
local HELD_MAX = 100
local MOST = tonumber(ARGV[3])

-- Whether files wait. Requesting a file makes the pod a consumer, so the request is sent only if there is a file.
local function has_files()
  local last = group_info()['last-delivered-id']
  return redis.call('XRANGE', WORK, '(' .. last, '+', 'COUNT', 1)[1] ~= nil
end

local function next_files(pod, count, holds_any)
  local read = redis.call('XREADGROUP', 'GROUP', GROUP, pod, 'COUNT', count, 'STREAMS', WORK, '>')
  if read then return read[1][2] end
  if not holds_any then redis.call('XGROUP', 'DELCONSUMER', WORK, GROUP, pod) end
  return {}
end

local function put_into(inbox, entry)
  redis.call('XADD', inbox, entry[1], unpack(entry[2]))
end

-- Makes the inbox match the entries that the pod holds.
local function restore(inbox, held)
  local there = redis.call('XRANGE', inbox, '-', '+')
  local is_whole = #held > 0 and #held == #there
  for i, row in ipairs(held) do is_whole = is_whole and row[1] == there[i][1] end
  if is_whole then return end
  redis.call('UNLINK', inbox)
  for _, row in ipairs(held) do
    local entry = redis.call('XRANGE', WORK, row[1], row[1])[1]
    -- If it is missing, it was deleted by hand.
    if entry then put_into(inbox, entry) end
  end
end

local served, empty = {}, not has_files()
for i = 4, #ARGV do
  local pod, inbox = ARGV[i], inbox_of(ARGV[i])
  local held = redis.call('XPENDING', WORK, GROUP, '-', '+', HELD_MAX, pod)
  restore(inbox, held)
  if #held < MOST and not empty then
    local files = next_files(pod, MOST - #held, #held > 0)
    for _, entry in ipairs(files) do put_into(inbox, entry) end
    empty = #files < MOST - #held
    if #files > 0 then served[#served + 1] = pod end
  end
  if #held > 0 and served[#served] ~= pod then served[#served + 1] = pod end
  if served[#served] == pod then redis.call('PEXPIRE', inbox, INBOX_LIFETIME) end
end
return { 'OK', served }
