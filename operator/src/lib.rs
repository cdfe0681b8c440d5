//! The operator: lists buckets, queues their files, and accounts for every one of them.

pub mod lease;
pub mod listing;
pub mod metrics;
pub mod server;
