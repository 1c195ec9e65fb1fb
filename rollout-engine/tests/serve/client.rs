//! A client that can also misbehave.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longer than any answer here should take, even on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) struct Reply {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The body of a good answer.
    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// The object `error` of an answer with this status.
    #[track_caller]
    pub(crate) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        let error = self.json()["error"].clone();
        for field in ["message", "type", "param", "code"] {
            assert!(error.get(field).is_some(), "{field} is not in {error}");
        }
        error
    }

    /// The data of server-sent events, without the closing `[DONE]`, which must be there.
    #[track_caller]
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        let mut data: Vec<_> = self
            .text()
            .split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: ").expect("an event of data"))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter()
            .map(|data| serde_json::from_str(data).expect("JSON"))
            .collect()
    }
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("connects");
    stream.set_read_timeout(Some(DEADLINE)).expect("settable");
    stream.set_write_timeout(Some(DEADLINE)).expect("settable");
    stream
}

/// The bytes of a request with a JSON body.
pub(crate) fn post_bytes(path: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    exchange(address, &post_bytes(path, body.to_string().as_bytes()))
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Reply {
    request(address, "GET", path, &[], b"")
}

pub(crate) fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let mut bytes = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    for (name, value) in headers {
        bytes += &format!("{name}: {value}\r\n");
    }
    bytes += &format!("content-length: {}\r\n\r\n", body.len());
    exchange(address, &[bytes.as_bytes(), body].concat())
}

/// Sends bytes and reads one answer. That the server stops reading early is no error here.
pub(crate) fn exchange(address: SocketAddr, bytes: &[u8]) -> Reply {
    let mut stream = connect(address);
    let _ = stream.write_all(bytes);
    read_reply(stream)
}

pub(crate) fn read_reply(stream: TcpStream) -> Reply {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).expect("a status line");
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("{line:?}"));
    let status = status.parse().expect("a status");
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a header");
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_string()));
    }
    let mut reply = Reply {
        status,
        headers,
        body: Vec::new(),
    };
    if reply.header("transfer-encoding") == Some("chunked") {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).expect("a chunk's size");
            let size = usize::from_str_radix(size.trim(), 16).expect("a chunk's size");
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).expect("a chunk");
            reply.body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    } else {
        let length = reply
            .header("content-length")
            .map_or(0, |n| n.parse().expect("a length"));
        reply.body = vec![0; length];
        reader.read_exact(&mut reply.body).expect("the body");
    }
    reply
}
