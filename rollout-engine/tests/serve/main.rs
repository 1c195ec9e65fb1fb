//! The HTTP server from outside: what it answers, under which policy, and what it withstands.

mod api;
mod client;
mod command;
mod faults;
mod limits;
mod model;
mod overhead;
mod pause;
mod policies;
mod side_by_side;
mod support;
mod watchdog;
mod weights;
