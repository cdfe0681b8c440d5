-- What becomes of an attempt, for the scripts that settle: ARGV[3..7] are theirs in common.
local RUN = ARGV[3]
local MAX_ATTEMPTS, BACKOFF_INITIAL, BACKOFF_MAX = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local RESULTS_MAX = tonumber(ARGV[7])
local NOW = now_ms()
local counted = { succeeded = 0, failed = 0, retried = 0, reclaimed = 0 }

local function record(file, attempts, outcome)
  if RESULTS_MAX > 0 then
    redis.call('XADD', RESULTS, 'MAXLEN', '~', RESULTS_MAX, '*', 'file', file, 'attempts', attempts, 'outcome', outcome)
  end
end

-- Half of the exponential delay is fixed, the other half is spread by the caller's random number.
local function delay_after(attempts, jitter)
  local delay = math.min(BACKOFF_MAX, BACKOFF_INITIAL * 2 ^ math.min(attempts - 1, 52))
  return math.floor(delay * (0.5 + jitter / 2))
end

-- The entry is acknowledged and failed: to the stream again, to the retry set, or to the dead letters.
local function fail(id, pod, retryable, reason, exit_code, jitter)
  local entry = redis.call('XRANGE', WORK, id, id)[1]
  if not entry then return 'IGNORED' end
  local message = fields_of(entry)
  local attempts = tonumber(message.attempts) + 1
  redis.call('XDEL', WORK, id)
  if retryable and attempts < MAX_ATTEMPTS then
    counted.retried = counted.retried + 1
    local delay = delay_after(attempts, jitter)
    if delay == 0 then
      add_work(RUN, message.file, attempts, message.size, message.etag)
    else
      -- The id makes the member unique, so that two entries of one key never become one.
      redis.call('ZADD', RETRY, NOW + delay, cjson.encode({ id, message.file, attempts, message.size, message.etag }))
    end
    return { 'RETRYING', message.file, attempts, delay }
  end
  counted.failed = counted.failed + 1
  add_dead_letter(RUN, message.file, attempts, reason, exit_code, pod)
  record(message.file, attempts, 'failed')
  return { 'DEAD', message.file, attempts }
end

-- The entry is acknowledged and nobody has tried the file: to the stream again, as it was.
local function release(id)
  local entry = redis.call('XRANGE', WORK, id, id)[1]
  if not entry then return 'IGNORED' end
  local message = fields_of(entry)
  redis.call('XDEL', WORK, id)
  add_work(RUN, message.file, message.attempts, message.size, message.etag)
  return 'RELEASED'
end

-- Consumers are pods; a pod without entries never comes back, and would otherwise stay in the group for ever.
local function forget_idle(consumer)
  if #redis.call('XPENDING', WORK, GROUP, '-', '+', 1, consumer) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', WORK, GROUP, consumer)
  end
end

local function publish_counts()
  for name, number in pairs(counted) do
    if number > 0 then redis.call('HINCRBY', META, name, number) end
  end
end
