//! Entries of the work stream, and dead letters.

use std::collections::HashMap;
use std::fmt;

use redis::streams::StreamId;
use redis::{FromRedisValue, Value};

use crate::Error;

/// A file, as listed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct File {
    /// Its exact key in the bucket.
    pub key: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its etag: if the object has another one when it is fetched, it has changed since.
    pub etag: String,
}

/// A file, as handed to a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The entry in the work stream; the operator settles it by this id.
    pub entry: EntryId,
    /// Id of the run.
    pub run: String,
    /// The file.
    pub file: File,
    /// How many attempts failed before this one.
    pub attempts: u32,
    /// How many disruptions in a row count against it.
    pub disruptions: u32,
}

/// A file that failed permanently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The entry in the dead-letter stream.
    pub entry: EntryId,
    /// When it failed, in milliseconds since the epoch, by the server's clock.
    pub time_ms: u64,
    /// Id of the run.
    pub run: String,
    /// Key of the file.
    pub file: String,
    /// How often it was tried.
    pub attempts: u32,
    /// Why it failed.
    pub reason: String,
    /// Exit code of the container that failed, if one did.
    pub exit_code: Option<i32>,
    /// The pod of the last attempt, if there was one.
    pub pod: Option<String>,
}

/// Id of a stream entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId(pub(crate) String);

impl EntryId {
    /// The id as Valkey writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for EntryId {
    fn from(id: String) -> Self {
        Self(id)
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Claim {
    pub(crate) fn read(doing: &'static str, entry: StreamId) -> Result<Self, Error> {
        let fields = Fields { doing, map: &entry.map };
        let file = File { key: fields.get("file")?, size: fields.get("size")?, etag: fields.get("etag")? };
        Ok(Self {
            run: fields.get("run")?,
            file,
            attempts: fields.get("attempts")?,
            // Entries of older versions lack this field.
            disruptions: fields.find("disruptions")?.unwrap_or(0),
            entry: EntryId(entry.id),
        })
    }
}

impl DeadLetter {
    pub(crate) fn read(doing: &'static str, entry: StreamId) -> Result<Self, Error> {
        let fields = Fields { doing, map: &entry.map };
        let exit_code: String = fields.get("exitCode")?;
        let time = entry.id.split('-').next().and_then(|time| time.parse().ok());
        Ok(Self {
            time_ms: time.ok_or_else(|| Error::reply(doing, format!("{:?} is not an entry ID", entry.id)))?,
            run: fields.get("run")?,
            file: fields.get("file")?,
            attempts: fields.get("attempts")?,
            reason: fields.get("reason")?,
            exit_code: exit_code.parse().ok(),
            pod: Some(fields.get::<String>("pod")?).filter(|pod| !pod.is_empty()),
            entry: EntryId(entry.id),
        })
    }
}

struct Fields<'a> {
    doing: &'static str,
    map: &'a HashMap<String, Value>,
}

impl Fields<'_> {
    fn get<T: FromRedisValue>(&self, name: &str) -> Result<T, Error> {
        self.find(name)?.ok_or_else(|| Error::reply(self.doing, format!("an entry has no field {name}")))
    }

    fn find<T: FromRedisValue>(&self, name: &str) -> Result<Option<T>, Error> {
        self.map
            .get(name)
            .map(T::from_redis_value_ref)
            .transpose()
            .map_err(|error| Error::reply(self.doing, format!("field {name}: {error}")))
    }
}
