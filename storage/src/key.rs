//! Keys as encoded in listings: XML cannot represent every character of a key, so listings are requested with
//! `encoding-type=url`.

/// Why a key in a listing cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeyError {
    #[error("it has a percent sign that begins no escape")]
    Escape,
    #[error("it is not UTF-8")]
    NotUtf8,
}

/// Decodes exactly. AWS and MinIO encode a space as `+`, Ceph as `%20`; all encode a plus as `%2B`.
pub(crate) fn decode(encoded: &str) -> Result<String, KeyError> {
    let mut bytes = encoded.bytes();
    let mut key = Vec::with_capacity(encoded.len());
    while let Some(byte) = bytes.next() {
        key.push(match byte {
            b'+' => b' ',
            b'%' => digit(bytes.next())? * 16 + digit(bytes.next())?,
            plain => plain,
        });
    }
    String::from_utf8(key).map_err(|_| KeyError::NotUtf8)
}

fn digit(byte: Option<u8>) -> Result<u8, KeyError> {
    let digit = byte.and_then(|byte| char::from(byte).to_digit(16)).ok_or(KeyError::Escape)?;
    u8::try_from(digit).map_err(|_| KeyError::Escape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_comes_back() {
        for (encoded, key) in [
            ("a+b%20c", "a b c"),
            ("1%2B1%3D2", "1+1=2"),
            ("100%25+%25", "100% %"),
            ("new%0Aline%0d", "new\nline\r"),
            ("%C3%BC%E6%97%A5", "ü日"),
            ("../%2Flead/%01", "..//lead/\u{1}"),
            ("ü", "ü"),
        ] {
            assert_eq!(decode(encoded).as_deref(), Ok(key), "{encoded}");
        }
    }

    #[test]
    fn what_is_no_key_is_refused() {
        assert_eq!(decode("a%FFb"), Err(KeyError::NotUtf8));
        for wrong in ["%", "%2", "%zz", "a%+1"] {
            assert_eq!(decode(wrong), Err(KeyError::Escape), "{wrong}");
        }
    }
}
