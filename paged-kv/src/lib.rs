#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![cfg_attr(feature = "cuda", deny(unsafe_code))]

mod cache;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod ids;
mod layout;
mod table;

pub use cache::{KvCache, KvSlice, KvView};
pub use error::Error;
pub use ids::{PageId, Slot};
pub use layout::{KvDtype, KvLayout};
pub use table::{IntegrityError, PageCopy, PageTable, PageTableConfig, Reservation};
