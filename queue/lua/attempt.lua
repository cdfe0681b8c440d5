-- Records the result of attempts, for every script that settles. These scripts share ARGV[3..8].
local RUN = ARGV[3]
local MAX_ATTEMPTS, MAX_DISRUPTIONS = tonumber(ARGV[4]), tonumber(ARGV[5])
local BACKOFF_INITIAL, BACKOFF_MAX = tonumber(ARGV[6]), tonumber(ARGV[7])
local RESULTS_MAX = tonumber(ARGV[8])
local NOW = now_ms()
local CLOSED = closed()
-- Entries that were taken, the finished ones among them, and inboxes of forgotten consumers. Each list is
-- processed by a single command.
local taken, finished, emptied = {}, {}, {}
local counted = { succeeded = 0, failed = 0, retried = 0, reclaimed = 0, disrupted = 0 }
-- The entry that succeeded most recently.
local newest

local function record(file, attempts, outcome)
  if RESULTS_MAX > 0 then
    redis.call('XADD', RESULTS, 'MAXLEN', '~', RESULTS_MAX, '*', 'file', file, 'attempts', attempts, 'outcome', outcome)
  end
end

-- Takes an entry from the consumer that the caller names; false if that consumer does not hold it. A consumer
-- is a pod: once it has no entries, it never comes back, so it is forgotten with its last entry.
local function take(id, consumer)
  -- The stream was deleted with the run, and querying it would be an error.
  if CLOSED then return false end
  local held = redis.call('XPENDING', WORK, GROUP, '-', '+', 2, consumer)
  if #held == 1 and held[1][1] == id then
    -- This also acknowledges its entry: one command for both.
    redis.call('XGROUP', 'DELCONSUMER', WORK, GROUP, consumer)
    emptied[#emptied + 1] = inbox_of(consumer)
    taken[#taken + 1] = id
    return true
  end
  if #held < 2 then return false end
  -- The id may come from a pod and be invalid.
  local row = redis.pcall('XPENDING', WORK, GROUP, id, id, 1, consumer)
  if row.err or #row == 0 or row[1][1] ~= id then return false end
  redis.call('XACK', WORK, GROUP, id)
  redis.call('XDEL', inbox_of(consumer), id)
  taken[#taken + 1] = id
  return true
end

local function message_of(id)
  local entry = redis.call('XRANGE', WORK, id, id)[1]
  return entry and fields_of(entry)
end

-- Half of the exponential delay is fixed; the caller's random number spreads the other half.
local function delay_after(attempts, jitter)
  local delay = math.min(BACKOFF_MAX, BACKOFF_INITIAL * 2 ^ math.min(attempts - 1, 52))
  return math.floor(delay * (0.5 + jitter / 2))
end

-- Charges an attempt: the file goes back to the stream, to the retry set, or to the dead letters. Only
-- consecutive disruptions count, so a charged attempt resets their number.
local function charge(id, message, pod, retryable, reason, exit_code, jitter)
  local attempts = tonumber(message.attempts) + 1
  finished[#finished + 1] = id
  if retryable and attempts < MAX_ATTEMPTS then
    counted.retried = counted.retried + 1
    local delay = delay_after(attempts, jitter)
    if delay == 0 then
      add_work(RUN, message.file, attempts, 0, message.size, message.etag)
    else
      -- The id makes the member unique, so that two entries with the same key never become one.
      redis.call('ZADD', RETRY, NOW + delay, cjson.encode({ id, message.file, attempts, message.size, message.etag, 0 }))
    end
    return { 'RETRYING', message.file, attempts, delay }
  end
  counted.failed = counted.failed + 1
  add_dead_letter(RUN, message.file, attempts, reason, exit_code, pod)
  record(message.file, attempts, 'failed')
  return { 'DEAD', message.file, attempts }
end

-- Counts an entry that was taken as succeeded.
local function succeed(id)
  local message = RESULTS_MAX > 0 and message_of(id)
  if message then record(message.file, tonumber(message.attempts) + 1, 'succeeded') end
  finished[#finished + 1] = id
  newest = id
  counted.succeeded = counted.succeeded + 1
  return 'SUCCEEDED'
end

-- Charges an attempt to an entry that was taken.
local function fail(id, pod, retryable, reason, exit_code, jitter)
  local message = message_of(id)
  if not message then return 'IGNORED' end
  return charge(id, message, pod, retryable, reason, exit_code, jitter)
end

-- Queues an entry again whose attempt ended for a reason other than the file, without charging an attempt. A
-- file that is disrupted too often in a row may be the cause, so it is charged.
local function disrupt(id, pod, counts, reason, exit_code, jitter)
  local message = message_of(id)
  if not message then return 'IGNORED' end
  message.disruptions = tonumber(message.disruptions) + (counts and 1 or 0)
  if counts and message.disruptions > MAX_DISRUPTIONS then
    reason = 'disrupted ' .. message.disruptions .. ' times in a row, the last time: ' .. reason
    return charge(id, message, pod, true, reason, exit_code, jitter)
  end
  counted.disrupted = counted.disrupted + 1
  requeue(RUN, id, message)
  return { 'DISRUPTED', message.file, message.disruptions }
end

-- Queues an entry again, unchanged, that was taken but never tried.
local function release(id)
  local message = message_of(id)
  if not message then return 'IGNORED' end
  requeue(RUN, id, message)
  return 'RELEASED'
end

-- Remembers the file that succeeded most recently, and returns its key. Later pods read that object to
-- distinguish unavailable storage from a failing object; by then, the operator that saw it succeed may be
-- gone. Keys with control characters are not passed to pods, where a line break separates keys, so such a key
-- does not replace an earlier one.
local function remember_canary()
  local message = newest and message_of(newest)
  local file = message and message.file
  -- The second pattern matches Unicode control characters that are two bytes in UTF-8.
  if not file or file:find('%c') or file:find('\194[\128-\159]') then return nil end
  redis.call('HSET', META, 'canary', file)
  return file
end

-- Applies everything collected so far; returns the key of the file that succeeded most recently, if any.
local function conclude()
  -- This comes first, because the entry is deleted below.
  local canary = remember_canary()
  if #emptied > 0 then redis.call('UNLINK', unpack(emptied)) end
  if #finished > 0 then redis.call('XDEL', WORK, unpack(finished)) end
  -- The workers' reports about these entries are no longer needed.
  if #taken > 0 then redis.call('HDEL', STATES, unpack(taken)) end
  for name, number in pairs(counted) do
    if number > 0 then redis.call('HINCRBY', META, name, number) end
  end
  return canary
end
