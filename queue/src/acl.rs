//! One Valkey user per run, for its workers: it reads the inboxes of its run's pods. Where a pod processes one file it cannot
//! write at all, so no worker can fill the server; where it processes many it writes what became of them into one hash, which
//! the operator measures before it reads it. Users made at run time are forgotten when the server restarts, so the operator
//! restores them.

use std::collections::{BTreeSet, HashMap};

use protocol::RunId;
use redis::{FromRedisValue, Value};
use sha2::{Digest, Sha256};

use crate::connection::{Connection, Password};
use crate::{Error, QueueKeys, RunQueue, random};

/// What a worker may do: read what it was given, and ask whether the server is alive. Not `XREADGROUP`: it takes a name of the
/// caller's choice, which the server keeps past its `maxmemory` and repeats in its log for every file.
const CLAIM: &[&str] = &["-@all", "+xread", "+ping"];
/// The same, and to say what became of files.
const SERVE: &[&str] = &["-@all", "+xread", "+hset", "+ping"];

/// What the workers of a run do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Each reads the one file that it was given.
    Claim,
    /// Each reads many files, and says what became of them.
    Serve,
}

/// The Valkey user of a run's workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerUser {
    /// Name of the user.
    pub name: String,
    /// Its password, which goes into a Secret of the run.
    pub password: Password,
    keys: Vec<String>,
    commands: &'static [&'static str],
}

/// What `ensure` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ensured {
    /// The user was there, exactly as it should be.
    Present,
    /// The user was missing or different, and is now as it should be.
    Restored,
}

impl WorkerUser {
    /// A user with a new random password. It does not exist until `ensure` makes it.
    pub fn generate(run: &RunId, owner: &str, rights: Rights) -> Result<Self, Error> {
        let password = format!("{}{}", random::hex()?, random::hex()?);
        Ok(Self::with_password(run, owner, rights, password.into()))
    }

    /// The user of a run whose password was generated before.
    pub fn with_password(run: &RunId, owner: &str, rights: Rights, password: Password) -> Self {
        let all = QueueKeys::of(run);
        let mut keys = vec![format!("%R~{}", all.inbox("*"))];
        let commands = match rights {
            Rights::Claim => CLAIM,
            Rights::Serve => {
                keys.push(format!("%W~{}", all.states));
                SERVE
            }
        };
        Self { name: Self::name_of(run, owner), password, keys, commands }
    }

    /// The owner's UID is part of the name: an object that lays claim to the runId of another one, and is refused, does
    /// not get hold of its workers' user by that.
    fn name_of(run: &RunId, owner: &str) -> String {
        format!("openfilter:{run}:{owner}")
    }

    /// Makes the user if it is missing, and puts it right if it is not as it should be.
    pub async fn ensure(&self, connection: &Connection) -> Result<Ensured, Error> {
        if self.is_present(connection).await? {
            return Ok(Ensured::Present);
        }
        let mut command = redis::cmd("ACL");
        // `reset` first: whatever the user could do before, it can do no longer. The password goes as a hash, so that
        // it shows neither in MONITOR nor in the slow log.
        command
            .arg("SETUSER")
            .arg(&self.name)
            .arg("reset")
            .arg("on")
            .arg(format!("#{}", self.password_hash()));
        command.arg(&self.keys).arg(self.commands);
        connection.command::<Value>("make the user of the run's workers", &command).await?;
        Ok(Ensured::Restored)
    }

    /// Whether the user exists with exactly this password and these rights.
    pub async fn is_present(&self, connection: &Connection) -> Result<bool, Error> {
        const DOING: &str = "verify the user of the run's workers";
        let mut command = redis::cmd("ACL");
        command.arg("GETUSER").arg(&self.name);
        let Some(user) = connection.command::<Option<HashMap<String, Value>>>(DOING, &command).await? else {
            return Ok(false);
        };
        fn field<T: FromRedisValue + Default>(user: &HashMap<String, Value>, name: &str) -> Result<T, Error> {
            user.get(name).map_or_else(
                || Ok(T::default()),
                |value| {
                    T::from_redis_value_ref(value)
                        .map_err(|error| Error::reply(DOING, format!("{name}: {error}")))
                },
            )
        }
        let flags: BTreeSet<String> = field(&user, "flags")?;
        let commands: String = field(&user, "commands")?;
        Ok(flags.contains("on")
            && !flags.contains("nopass")
            && field::<Vec<String>>(&user, "passwords")? == [self.password_hash()]
            && commands.split_whitespace().collect::<BTreeSet<_>>()
                == self.commands.iter().copied().collect()
            && field::<String>(&user, "keys")? == self.keys.join(" ")
            && field::<String>(&user, "channels")?.is_empty()
            && field::<Vec<Value>>(&user, "selectors")?.is_empty())
    }

    /// Removes the user of a run and ends its connections, and then what it wrote. It may be gone already.
    pub async fn remove(connection: &Connection, run: &RunId, owner: &str) -> Result<(), Error> {
        let mut command = redis::cmd("ACL");
        command.arg("DELUSER").arg(Self::name_of(run, owner));
        connection.command::<u64>("remove the user of the run's workers", &command).await?;
        RunQueue::forget_reports(connection, run, owner).await
    }

    fn password_hash(&self) -> String {
        random::to_hex(&Sha256::digest(self.password.reveal()))
    }
}
