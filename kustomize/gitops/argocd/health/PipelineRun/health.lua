-- Healthy: the run has succeeded. Degraded: it has failed, or needs a person. Suspended: it is paused.
-- Everything else is Progressing, including obstacles that clear by themselves; the message names them.
local health = { status = "Progressing", message = "waiting for the operator" }
if obj.status == nil or obj.status.conditions == nil then
  return health
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  health.message = "waiting for the operator to see the change"
  return health
end
local conditions = {}
for _, condition in ipairs(obj.status.conditions) do
  conditions[condition.type] = condition
end
local ready, stalled = conditions["Ready"], conditions["Stalled"]
if ready == nil then
  return health
end
health.message = ready.reason .. ": " .. ready.message
if ready.status == "True" then
  health.status = "Healthy"
elseif stalled ~= nil and stalled.status == "True" then
  health.status = "Degraded"
elseif obj.status.phase == "Suspended" then
  health.status = "Suspended"
end
return health
