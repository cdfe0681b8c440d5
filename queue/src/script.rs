//! The scripts, each one atomic transition. They are called by their hash and loaded again when the server has
//! forgotten them. Not a function library: two versions of the operator may run at once during an upgrade, and each
//! must find its own code.

use std::sync::LazyLock;

macro_rules! scripts {
    ($($name:ident, $doing:literal, $($file:literal),+;)+) => {
        /// A script by its name in the protocol.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Script { $($name),+ }

        impl Script {
            /// What it does, as an error says it.
            pub(crate) fn doing(self) -> &'static str {
                match self { $(Self::$name => $doing),+ }
            }

            pub(crate) fn code(self) -> &'static redis::Script {
                match self {
                    $(Self::$name => {
                        static CODE: LazyLock<redis::Script> = LazyLock::new(|| {
                            redis::Script::new(concat!($(include_str!(concat!("../lua/", $file, ".lua")), "\n"),+))
                        });
                        &CODE
                    })+
                }
            }
        }
    };
}

scripts! {
    Open, "open the queue of the run", "common", "open";
    Enqueue, "queue a page of files", "common", "enqueue";
    Settle, "settle files", "common", "attempt", "settle";
    Reclaim, "reclaim files of dead pods", "common", "attempt", "reclaim";
    Recover, "find files that nobody holds", "common", "recover";
    Promote, "queue files for their next attempt", "common", "promote";
    Close, "close the queue of the run", "common", "close";
    Stats, "count the files of the run", "common", "stats";
    Delete, "delete the queue of the run", "common", "delete";
}
