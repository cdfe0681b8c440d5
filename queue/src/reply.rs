//! Parses the reply of a script: a word, or an array that begins with one.

use redis::{FromRedisValue, Value};

use crate::Error;

pub(crate) struct Reply {
    doing: &'static str,
    word: String,
    rest: std::vec::IntoIter<Value>,
}

impl Reply {
    pub(crate) fn read(doing: &'static str, value: Value) -> Result<Self, Error> {
        let values = match value {
            Value::Array(values) => values,
            word => vec![word],
        };
        let mut rest = values.into_iter();
        let word = rest.next().and_then(|word| String::from_redis_value(word).ok());
        let word = word.ok_or_else(|| Error::reply(doing, "it does not begin with a word"))?;
        if word == "LOST" { Err(Error::Lost { doing }) } else { Ok(Self { doing, word, rest }) }
    }

    pub(crate) fn word(&self) -> &str {
        &self.word
    }

    pub(crate) fn next<T: FromRedisValue>(&mut self) -> Result<T, Error> {
        let value = self.rest.next().ok_or_else(|| Error::reply(self.doing, "it is too short"))?;
        T::from_redis_value(value).map_err(|error| Error::reply(self.doing, error.to_string()))
    }

    pub(crate) fn unexpected<T>(self) -> Result<T, Error> {
        Err(Error::reply(self.doing, format!("{:?}", self.word)))
    }
}
