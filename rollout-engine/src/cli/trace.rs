//! `--trace FILE`: spans and events in the trace event format that `chrome://tracing`, Perfetto and others read.
//!
//! The file is a JSON list at every moment, also if the process is killed: each event is written over the closing
//! bracket, together with a new one.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::CliError;

/// How every trace file starts, by which an old one is told from a file that must not be lost.
const HEAD: &str = "[\n{\"name\":\"process_name\",\"ph\":\"M\"";
/// How it ends.
const TAIL: &str = "\n]\n";

/// A trace that is being written. Clones write to the same file.
#[derive(Clone)]
pub(super) struct TraceFile {
    state: Arc<Mutex<State>>,
    path: Arc<PathBuf>,
    start: Instant,
}

struct State {
    file: File,
    /// Where the closing bracket stands.
    tail: u64,
    /// What went wrong first. Nothing is written after that.
    error: Option<io::Error>,
}

impl TraceFile {
    /// A new trace, in place of an old one if there is one.
    pub(super) fn create(path: &Path) -> Result<Self, CliError> {
        let fail = |error: io::Error| CliError::Failed(format!("--trace {}: {error}", path.display()));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(fail)?;
        let mut head = [0; HEAD.len()];
        // Reading a pipe could take for ever.
        let found = match file.metadata().map_err(fail)?.is_file() {
            true => Some(read_up_to(&mut file, &mut head).map_err(fail)?),
            false => None,
        };
        if found.is_none_or(|found| !HEAD.as_bytes().starts_with(&head[..found])) {
            return Err(CliError::Usage(format!(
                "--trace {} is there and not a trace: name another file",
                path.display()
            )));
        }
        file.set_len(0).map_err(fail)?;
        let pid = std::process::id();
        let first = format!("{HEAD},\"pid\":{pid},\"tid\":0,\"args\":{{\"name\":\"rollout\"}}}}");
        let mut state = State {
            file,
            tail: 0,
            error: None,
        };
        state.write(&first).map_err(fail)?;
        Ok(Self {
            state: Arc::new(Mutex::new(state)),
            path: Arc::new(path.to_owned()),
            start: Instant::now(),
        })
    }

    /// What kept the trace from being written in full.
    pub(super) fn finish(&self) -> Result<(), CliError> {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match state.error.take() {
            None => Ok(()),
            Some(error) => Err(CliError::Failed(format!(
                "--trace {}: {error}: the trace ends early",
                self.path.display()
            ))),
        }
    }

    fn add(&self, event: &Value) {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if state.error.is_none()
            && let Err(error) = state.write(&format!(",\n{event}"))
        {
            state.error = Some(error);
        }
    }

    /// Microseconds since the start of the trace.
    fn now(&self) -> f64 {
        self.start.elapsed().as_nanos() as f64 / 1e3
    }
}

impl State {
    fn write(&mut self, text: &str) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.tail))?;
        if let Err(error) = self.file.write_all(format!("{text}{TAIL}").as_bytes()) {
            // The space of the bracket is still the file's own; if not, readers take a list without one too.
            let _ = self.file.set_len(self.tail);
            let _ = self.file.seek(SeekFrom::Start(self.tail));
            let _ = self.file.write_all(TAIL.as_bytes());
            return Err(error);
        }
        self.tail += text.len() as u64;
        Ok(())
    }
}

fn read_up_to(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut found = 0;
    while found < buffer.len() {
        match file.read(&mut buffer[found..])? {
            0 => break,
            n => found += n,
        }
    }
    Ok(found)
}

/// Writes a complete event per span, from its first entry to its end, and an instant per event.
pub(super) struct TraceLayer {
    file: TraceFile,
}

impl TraceLayer {
    pub(super) fn new(file: TraceFile) -> Self {
        Self { file }
    }
}

/// What is kept of a span until it ends.
struct Timing {
    start: f64,
    fields: Fields,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let start = self.file.now();
        span.extensions_mut().insert(Timing { start, fields });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(timing) = span.extensions_mut().get_mut::<Timing>()
        {
            values.record(&mut timing.fields);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(timing) = span.extensions_mut().remove::<Timing>() else {
            return;
        };
        self.file.add(&json!({
            "name": span.name(),
            "cat": span.metadata().target(),
            "ph": "X",
            "ts": timing.start,
            "dur": self.file.now() - timing.start,
            "pid": std::process::id(),
            "tid": thread_number(),
            "args": timing.fields.0,
        }));
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let name = fields
            .0
            .remove("message")
            .unwrap_or_else(|| event.metadata().name().into());
        self.file.add(&json!({
            "name": name,
            "cat": event.metadata().target(),
            "ph": "i",
            "s": "t",
            "ts": self.file.now(),
            "pid": std::process::id(),
            "tid": thread_number(),
            "args": fields.0,
        }));
    }
}

/// A small number for each thread, from 1.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// The fields of a span or event, as JSON.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let mut text = String::new();
        let _ = write!(text, "{value:?}");
        self.0.insert(field.name().into(), text.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().into(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::prelude::*;

    fn events(path: &Path) -> Vec<Value> {
        serde_json::from_str(&std::fs::read_to_string(path).expect("readable")).expect("a JSON list")
    }

    #[test]
    fn spans_become_complete_events_and_the_file_is_valid_at_every_moment() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("trace.json");
        let file = TraceFile::create(&path).expect("new");
        assert_eq!(events(&path).len(), 1, "the name of the process");
        let subscriber = tracing_subscriber::registry().with(TraceLayer::new(file.clone()));
        tracing::subscriber::with_default(subscriber, || {
            let outer = tracing::info_span!("outer", rows = 3, kind = tracing::field::Empty).entered();
            tracing::info_span!("inner").in_scope(|| {
                outer.record("kind", "a \"quoted\"\nname");
                tracing::info!(left = -1, "half way");
            });
            assert_eq!(events(&path).len(), 3, "the outer span is not over");
        });
        file.finish().expect("no error");
        let events = events(&path);
        let names: Vec<_> = events
            .iter()
            .map(|event| event["name"].as_str().expect("text"))
            .collect();
        assert_eq!(names, ["process_name", "half way", "inner", "outer"]);
        let (instant, inner, outer) = (&events[1], &events[2], &events[3]);
        assert_eq!(
            (&instant["ph"], &instant["args"]["left"]),
            (&"i".into(), &(-1).into())
        );
        assert_eq!((&outer["ph"], &outer["args"]["rows"]), (&"X".into(), &3.into()));
        assert_eq!(outer["args"]["kind"], "a \"quoted\"\nname");
        let time = |event: &Value, key: &str| event[key].as_f64().expect("a number");
        assert!(time(outer, "ts") <= time(inner, "ts"));
        assert!(time(inner, "ts") + time(inner, "dur") <= time(outer, "ts") + time(outer, "dur"));
        assert_eq!(inner["tid"], outer["tid"]);
    }

    #[test]
    fn an_old_trace_is_replaced_and_any_other_file_is_kept() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("trace.json");
        for _ in 0..2 {
            TraceFile::create(&path).expect("none or an old one");
        }
        for content in ["{\"prompt\": \"x\"}\n", "[1]", "[\n{\"name\":\"other\"}]"] {
            std::fs::write(&path, content).expect("writable");
            let error = TraceFile::create(&path).err().expect("not a trace");
            assert_eq!(error.exit_code(), 2, "{error}");
            assert_eq!(std::fs::read_to_string(&path).expect("readable"), content);
        }
    }
}
