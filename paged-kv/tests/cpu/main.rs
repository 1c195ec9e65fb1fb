//! The page table and the cache on the CPU, in one binary: linking one costs more than most of its tests.

mod forks_and_prefixes;
mod kv_cache;
mod model;
mod page_table;
mod properties;
