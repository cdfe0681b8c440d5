//! A few signed requests to the S3 server: enough to fill a bucket and to see a server's answers.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;
use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::{
    error::{Doing, Error, Result},
    image::sha256,
};

const REGION: &str = "us-east-1";
/// How long to wait for a route to the server.
const CONNECTED_WITHIN: Duration = Duration::from_secs(60);
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// The signature covers the request but not its body, which is fine on one machine.
const PAYLOAD: &str = "UNSIGNED-PAYLOAD";

/// A client with one pair of keys.
#[derive(Debug, Clone)]
pub struct S3 {
    host: String,
    /// The access key.
    pub access_key: String,
    /// The secret key.
    pub secret_key: String,
}

impl S3 {
    /// A client of the server at this `http://` URL.
    pub fn new(url: &str, access_key: &str, secret_key: &str) -> Self {
        let host = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
        Self { host, access_key: access_key.to_owned(), secret_key: secret_key.to_owned() }
    }

    /// The access key and the secret key.
    pub fn keys(&self) -> (&str, &str) {
        (&self.access_key, &self.secret_key)
    }

    /// A client with the same keys for another server, or for a proxy in front of it.
    pub fn at(&self, url: &str) -> Self {
        Self::new(url, &self.access_key, &self.secret_key)
    }

    /// Creates a bucket, unless it exists.
    pub async fn make_bucket(&self, bucket: &str) -> Result<()> {
        match self.request(Method::PUT, &format!("/{bucket}"), Bytes::new()).await? {
            (status, _) if status.is_success() || status == StatusCode::CONFLICT => Ok(()),
            (status, body) => Err(refused("create the bucket", bucket, status, &body)),
        }
    }

    /// Stores an object.
    pub async fn put(&self, bucket: &str, key: &str, body: impl Into<Bytes>) -> Result<()> {
        match self.request(Method::PUT, &format!("/{bucket}/{key}"), body.into()).await? {
            (status, _) if status.is_success() => Ok(()),
            (status, body) => Err(refused("store", key, status, &body)),
        }
    }

    /// Reads an object.
    pub async fn get(&self, bucket: &str, key: &str) -> Result<Bytes> {
        match self.request(Method::GET, &format!("/{bucket}/{key}"), Bytes::new()).await? {
            (status, body) if status.is_success() => Ok(body),
            (status, body) => Err(refused("read", key, status, &body)),
        }
    }

    /// Sends one signed request; `path` must contain only characters that need no escaping.
    pub async fn request(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
        let doing = || format!("{method} {path} at {}", self.host);
        let time = amz_time(std::time::SystemTime::now());
        let request = http::Request::builder()
            .method(&method)
            .uri(path)
            .header("host", &self.host)
            .header("x-amz-date", &time)
            .header("x-amz-content-sha256", PAYLOAD)
            .header("authorization", self.authorization(&method, path, &time))
            .body(Full::new(body))
            .map_err(io::Error::other)
            .doing(doing)?;
        let stream = self.connect().await.doing(doing)?;
        let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.map_err(io::Error::other).doing(doing)?;
        let connection = tokio::spawn(connection);
        let answered = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            Ok((status, response.into_body().collect().await?.to_bytes()))
        }
        .await;
        connection.abort();
        answered.map_err(|error: hyper::Error| io::Error::other(error)).doing(doing)
    }

    /// While nodes come and go, the host may have no route to a service for a moment.
    async fn connect(&self) -> io::Result<TcpStream> {
        let began = Instant::now();
        loop {
            match TcpStream::connect(&self.host).await {
                Err(error) if is_without_route(&error) && began.elapsed() < CONNECTED_WITHIN => {
                    tokio::time::sleep(RETRY_AFTER).await;
                }
                connected => return connected,
            }
        }
    }

    /// AWS Signature Version 4, with the three headers that it needs.
    fn authorization(&self, method: &Method, path: &str, time: &str) -> String {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let signed = "host;x-amz-content-sha256;x-amz-date";
        let canonical = format!(
            "{method}\n{path}\n{query}\nhost:{}\nx-amz-content-sha256:{PAYLOAD}\nx-amz-date:{time}\n\n{signed}\n{PAYLOAD}",
            self.host
        );
        let day = &time[..8];
        let scope = format!("{day}/{REGION}/s3/aws4_request");
        let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", sha256(canonical.as_bytes()));
        let mut key = format!("AWS4{}", self.secret_key).into_bytes();
        for part in [day, REGION, "s3", "aws4_request", &text] {
            key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), part.as_bytes()).as_ref().to_vec();
        }
        let signature: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let credential = format!("{}/{scope}", self.access_key);
        format!("AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={signed}, Signature={signature}")
    }
}

/// Whether the request went nowhere. A server that refuses a connection has answered.
fn is_without_route(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable | ErrorKind::TimedOut)
}

fn refused(doing: &str, what: &str, status: StatusCode, body: &Bytes) -> Error {
    Error::Refused(format!(
        "cannot {doing} {what}: the S3 server answered {status}: {}",
        String::from_utf8_lossy(body)
    ))
}

/// `20130524T000000Z`, from the days since 1970 by the usual algorithm for the civil calendar.
fn amz_time(now: std::time::SystemTime) -> String {
    let seconds = now.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468; // days since 0000-03-01
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest % 3_600 / 60, rest % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn times_are_written_as_the_signature_wants_them() {
        let at = |seconds| amz_time(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(1_369_353_600), "20130524T000000Z");
        assert_eq!(at(1_709_211_599), "20240229T125959Z");
        assert_eq!(at(0), "19700101T000000Z");
    }
}
