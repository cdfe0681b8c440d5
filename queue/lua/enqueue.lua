-- enqueue: add one page of the listing and move the cursor.
-- Survives: a crash or lost reply between adding files and remembering how far the listing got. Both happen or neither;
-- a page that is sent twice is added once, because the cursor has moved.
-- ARGV: group, epoch, run, expected cursor, next cursor, listing is complete (0 or 1), then file, size, etag of each file
if lost() then return { 'LOST' } end
local meta = redis.call('HMGET', META, 'state', 'cursor', 'listed')
if meta[1] ~= 'open' or meta[3] == '1' or meta[2] ~= ARGV[4] then
  return { 'SUPERSEDED', meta[2], meta[1] == 'open' and meta[3] or '1' }
end

local files = 0
for i = 7, #ARGV, 3 do
  add_work(ARGV[3], ARGV[i], '0', ARGV[i + 1], ARGV[i + 2])
  files = files + 1
end
redis.call('HSET', META, 'cursor', ARGV[5], 'listed', ARGV[6])
return { 'ADDED', redis.call('HINCRBY', META, 'total', files) }
