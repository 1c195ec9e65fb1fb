//! Connections: how many, how long, and how they end.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Sleep;

use super::app::App;
use super::settings::Limits;

/// After its last answer a connection is read for so long, and so far: closing it with bytes unread, such as those of a
/// body that was refused, could take the answer from the client.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 << 20;
/// Connections beyond the limit, for requests that are answered at once: a full server still tells its health, and can be
/// told to go on.
const RESERVE: usize = 32;
/// Files of the process that are not connections.
const OTHER_FILES: usize = 128;
/// Pause after a connection could not be accepted, for instance because the process has too many files open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Where a limit says "any", hyper needs a time that can be added to the present one, and takes memory per header.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
const MOST_HEADERS: usize = 10_000;

/// Who answers on a connection.
pub(super) struct Routers {
    pub(super) usual: Router,
    /// On those beyond the limit.
    pub(super) when_full: Router,
}

/// Serves connections until `shutdown`, or until the engine's thread ends by a fault, then lets requests under way finish, for at most the drain time. Those that have
/// not finished by then are cut off.
pub(super) async fn run(
    listener: TcpListener,
    routers: Routers,
    app: Arc<App>,
    shutdown: impl Future<Output = ()>,
) {
    let limits = app.settings.limits;
    let most = most_open_files().saturating_sub(OTHER_FILES + RESERVE);
    let most = most.clamp(1, Semaphore::MAX_PERMITS - RESERVE);
    let usual = limits.max_connections.clamp(1, most);
    let permits = Arc::new(Semaphore::new(usual + RESERVE));
    let usual = Arc::new(Semaphore::new(usual));
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = async {
            // Before accepting: further clients wait in the system's queue.
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, stream) = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            () = &mut shutdown => break,
            // Nothing can be answered any more, and whoever started this process should know.
            () = app.shared.ended() => break,
        };
        let stream = match stream {
            Ok((stream, _)) => stream,
            Err(error) if is_about_the_client(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Only a matter of speed.
        let _ = stream.set_nodelay(true);
        let stream = TokioIo::new(Socket::new(stream, limits.write_timeout));
        let place = usual.clone().try_acquire_owned().ok();
        let router = match place {
            Some(_) => &routers.usual,
            None => &routers.when_full,
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(builder(&limits).serve_connection(stream, service));
        let app = app.clone();
        app.metrics.opened();
        connections.spawn(async move {
            // Clients that break off are nothing to report.
            let _ = connection.await;
            app.metrics.closed();
            drop((place, permit));
        });
    }
    // Before anyone can see that the end has come: what is sent from then on comes after it.
    app.engine.drain();
    drop(listener);
    let _ = tokio::time::timeout(limits.drain_timeout, graceful.shutdown()).await;
    connections.shutdown().await;
}

/// What the system allows this process, as far as it says so.
fn most_open_files() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next());
    soft.and_then(|soft| soft.parse().ok()).unwrap_or(usize::MAX)
}

/// Whether a connection ended before it was accepted.
fn is_about_the_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset
    )
}

fn builder(limits: &Limits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout.min(LONGEST_WAIT))
        .max_buf_size(limits.max_header_bytes.max(8192))
        .max_headers(limits.max_headers.min(MOST_HEADERS));
    builder
}

/// A stream that fails when its peer takes nothing for a while, although there is something to take, and that ends in
/// order.
struct Socket {
    stream: TcpStream,
    patience: Duration,
    /// Runs while a write waits.
    deadline: Option<Pin<Box<Sleep>>>,
    /// At the end: how long is read on, and the bytes that came. Nothing that is written or flushed meanwhile prolongs it.
    linger: Option<(Pin<Box<Sleep>>, usize)>,
}

impl Socket {
    fn new(stream: TcpStream, patience: Duration) -> Self {
        Self {
            stream,
            patience,
            deadline: None,
            linger: None,
        }
    }

    /// Passes a result on; while there is none, watches the time.
    fn watch<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.deadline = None;
            return result;
        }
        let patience = self.patience;
        let deadline = self
            .deadline
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(deadline.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, result)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, linger, .. } = self.get_mut();
        let (deadline, lingered) = match linger {
            Some((deadline, lingered)) => (deadline, lingered),
            None => {
                ready!(Pin::new(&mut *stream).poll_shutdown(context))?;
                let (deadline, lingered) = linger.insert((Box::pin(tokio::time::sleep(LINGER)), 0));
                (deadline, lingered)
            }
        };
        let mut scratch = [0; 4096];
        loop {
            if deadline.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = ReadBuf::new(&mut scratch);
            let read = ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer));
            *lingered += buffer.filled().len();
            if read.is_err() || buffer.filled().is_empty() || *lingered > LINGER_BYTES {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.watch(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
