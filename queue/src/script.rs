//! The scripts, each one atomic transition. They are called by their hash, and loaded again when the server
//! has forgotten them. They are not a function library, because two versions of the operator may run at once
//! during an upgrade, and each must find its own code.
//!
//! Every script states its flags, which the server reads from its first bytes. `allow-oom`: it may run on a
//! server that is at its `maxmemory`, because it settles or frees, or (`enqueue`) checks the memory itself.
//! `no-writes`: it only reads.

use std::sync::LazyLock;

macro_rules! scripts {
    ($($name:ident, $flags:literal, $doing:literal, $($file:literal),+;)+) => {
        /// A script by its name in the protocol.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Script { $($name),+ }

        impl Script {
            /// The action, as errors name it.
            pub(crate) fn doing(self) -> &'static str {
                match self { $(Self::$name => $doing),+ }
            }

            pub(crate) fn code(self) -> &'static redis::Script {
                match self {
                    $(Self::$name => {
                        static CODE: LazyLock<redis::Script> = LazyLock::new(|| {
                            redis::Script::new(concat!("#!lua flags=", $flags, "\n", $(include_str!(concat!("../lua/", $file, ".lua")), "\n"),+))
                        });
                        &CODE
                    })+
                }
            }
        }
    };
}

scripts! {
    Open, "allow-oom", "open the queue of the run", "common", "open";
    Begin, "allow-oom", "record when the run began", "common", "begin";
    Enqueue, "allow-oom", "queue a page of files", "common", "enqueue";
    HandOut, "allow-oom", "hand files to pods", "common", "hand_out";
    Stop, "allow-oom", "tell pods to end", "common", "stop";
    Settle, "allow-oom", "settle files", "common", "attempt", "settle";
    Take, "allow-oom", "take the reports of workers", "common", "attempt", "take";
    Reclaim, "allow-oom", "reclaim files of dead pods", "common", "attempt", "reclaim";
    Pending, "allow-oom", "list claimed files", "common", "pending";
    Recover, "allow-oom", "find files without a holder", "common", "recover";
    Promote, "allow-oom", "queue files for their next attempt", "common", "promote";
    Close, "allow-oom", "close the queue of the run", "common", "close";
    Stats, "no-writes", "count the files of the run", "common", "stats";
    TakeOver, "allow-oom", "take over the queue of the run", "common", "take_over";
    Forget, "allow-oom", "forget the reports of workers", "common", "forget";
    Delete, "allow-oom", "delete the queue of the run", "common", "delete";
    Remember, "allow-oom", "remember a run", "remember";
}
