//! Chat templates and tokenizers against what transformers made of the same conversations.

use rollout_engine::text::{ChatTemplate, ChatTemplates, TextPipeline, Tokenizer};
use rollout_engine::{ChatPrompt, Error, Prompt};
use serde_json::{Map, Value, json};

use crate::support::{bundled_model, fixtures};

fn chat(messages: Value) -> ChatPrompt {
    let Value::Array(messages) = messages else {
        panic!("messages are a list")
    };
    ChatPrompt::new(messages)
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Map::new()).expect("a valid template")
}

fn render(source: &str, messages: Value) -> String {
    template(source).render(&chat(messages)).expect("renders")
}

#[test]
fn conversations_for_qwen3_match_transformers() {
    let text = std::fs::read_to_string(fixtures().join("golden/chat-qwen3.json")).expect("the golden file");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    assert_eq!(cases.len(), 10);
    let pipeline = TextPipeline::from_dir(fixtures().join("qwen3-tokenizer"))
        .expect("loads")
        .expect("is there");
    for case in cases {
        let mut prompt = chat(case["messages"].clone());
        for (name, value) in case["options"].as_object().expect("options") {
            match (name.as_str(), value) {
                ("add_generation_prompt", value) => {
                    prompt.add_generation_prompt = value.as_bool().expect("bool")
                }
                ("tools", Value::Array(tools)) => prompt.tools = Some(tools.clone()),
                _ => {
                    prompt.variables.insert(name.clone(), value.clone());
                }
            }
        }
        assert_eq!(
            pipeline.chat_templates().render(&prompt).expect("renders"),
            case["text"].as_str().expect("text")
        );
        let ids = pipeline.encode(&Prompt::Chat(prompt)).expect("encodes");
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
        assert_eq!(ids, expected);
        assert_eq!(
            pipeline.decode(&ids).expect("decodes"),
            case["decoded"].as_str().expect("decoded")
        );
    }
}

#[test]
fn prompts_of_the_bundled_model_match_transformers() {
    let text = std::fs::read_to_string(fixtures().join("golden/greedy-base.json")).expect("the golden file");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    let pipeline = TextPipeline::from_dir(bundled_model())
        .expect("loads")
        .expect("is there");
    for case in cases {
        let ids = pipeline
            .encode(&Prompt::Chat(chat(case["messages"].clone())))
            .expect("encodes");
        assert_eq!(json!(ids), case["prompt_ids"]);
        let completion: Vec<u32> = serde_json::from_value(case["completion_ids"].clone()).expect("ids");
        assert_eq!(
            pipeline.decode(&completion).expect("decodes"),
            case["text"].as_str().expect("text")
        );
    }
}

/// The bundled model has 1,024 ids and its tokenizer 571.
#[test]
fn ids_above_the_tokenizers_vocabulary_decode_to_a_replacement_character() {
    let tokenizer = Tokenizer::from_file(bundled_model().join("tokenizer.json")).expect("loads");
    assert_eq!(tokenizer.vocab_size(), 571);
    let mut ids = tokenizer.encode("12 apples", false).expect("encodes");
    ids.insert(2, 1023);
    ids.push(571);
    ids.push(u32::MAX);
    let text = tokenizer.decode(&ids, true).expect("decodes");
    assert_eq!(text.matches('\u{FFFD}').count(), 3);
    assert_eq!(text.replace('\u{FFFD}', ""), "12 apples");
    assert_eq!(tokenizer.decode(&[], true).expect("decodes"), "");
}

#[test]
fn a_token_that_is_half_a_character_decodes_without_error() {
    let tokenizer = Tokenizer::from_file(fixtures().join("qwen3-tokenizer/tokenizer.json")).expect("loads");
    let ids = tokenizer.encode(" 🌍", false).expect("encodes");
    assert!(ids.len() > 1);
    assert!(
        tokenizer
            .decode(&ids[..1], true)
            .expect("decodes")
            .contains('\u{FFFD}')
    );
}

#[test]
fn blocks_are_trimmed_as_by_transformers() {
    // trim_blocks removes the line break after a block, lstrip_blocks the blanks before one.
    let source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n";
    assert_eq!(
        render(
            source,
            json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
        ),
        "a\nb\n"
    );
}

#[test]
fn tojson_is_pythons_json_dumps() {
    let messages = json!([{"role": "user", "z": 1, "a": [1.0, null, true, "é<&'\""], "e": {}}]);
    assert_eq!(
        render("{{ messages[0] | tojson }}", messages.clone()),
        r#"{"role": "user", "z": 1, "a": [1.0, null, true, "é<&'\""], "e": {}}"#
    );
    assert_eq!(
        render("{{ messages[0].a | tojson(indent=2) }}", messages.clone()),
        "[\n  1.0,\n  null,\n  true,\n  \"é<&'\\\"\"\n]"
    );
    assert_eq!(
        render(
            "{{ messages[0] | tojson(separators=[',', ':'], sort_keys=true) }}",
            messages
        ),
        r#"{"a":[1.0,null,true,"é<&'\""],"e":{},"role":"user","z":1}"#
    );
}

#[test]
fn values_are_printed_as_by_python() {
    assert_eq!(
        render(
            "{{ true }} {{ none }} {{ 1.0 }} {{ [1, 'a'] }} {{ undefined_thing }}|",
            json!([])
        ),
        "True None 1.0 [1, 'a'] |"
    );
}

#[test]
fn python_string_methods_and_reversed_slices_work() {
    let source = "{{ messages[0].content.strip().upper().split('B')[0] }}{{ messages[::-1][0].content.rstrip('\\n') }}\
                  {{ messages[0].get('absent', 'x') }}{% for k, v in messages[0].items() %}[{{ k }}]{% endfor %}";
    assert_eq!(
        render(
            source,
            json!([{"role": "user", "content": " abc "}, {"role": "user", "content": "q\n\n"}])
        ),
        "Aqx[role][content]"
    );
}

#[test]
fn loop_controls_and_generation_blocks_work() {
    let source = "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}\
                  {%- generation -%} {{ m.content }} {%- endgeneration %};{% endfor %}";
    let messages = json!([{"content": "a"}, {"content": "b"}, {"content": "c"}]);
    assert_eq!(render(source, messages), "a;b;");
}

#[test]
fn special_tokens_of_the_tokenizer_are_variables() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let config = json!({
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": false},
        "pad_token": null,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    });
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).expect("writable");
    let templates = ChatTemplates::from_dir(dir.path()).expect("loads");
    assert_eq!(
        templates
            .render(&chat(json!([{"content": "x"}])))
            .expect("renders"),
        "<s>x</s>"
    );
}

#[test]
fn named_templates_are_chosen_by_whether_there_are_tools() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let config = json!({"chat_template": [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools: {{ tools | length }}"},
        {"name": "rag", "template": "{{ documents }}"},
    ]});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).expect("writable");
    let templates = ChatTemplates::from_dir(dir.path()).expect("loads");
    let mut prompt = chat(json!([]));
    assert_eq!(templates.render(&prompt).expect("renders"), "plain");
    prompt.tools = Some(vec![json!({}), json!({})]);
    assert_eq!(templates.render(&prompt).expect("renders"), "tools: 2");
    // A template in its own file wins over the configuration.
    std::fs::write(dir.path().join("chat_template.jinja"), "from the file").expect("writable");
    assert_eq!(
        ChatTemplates::from_dir(dir.path())
            .expect("loads")
            .render(&prompt)
            .expect("renders"),
        "from the file"
    );
}

#[test]
fn an_exception_raised_by_the_template_is_the_error() {
    let source = "{% if messages[0].role != 'user' %}\n{{ raise_exception('Start with a user message') }}\n{% endif %}";
    let error = template(source)
        .render(&chat(json!([{"role": "assistant"}])))
        .expect_err("raises");
    assert!(
        matches!(&error, Error::ChatTemplate { reason } if reason.starts_with("Start with a user message"))
    );
}

#[test]
fn the_date_is_formatted_as_by_strftime() {
    let text = render("{{ strftime_now('%Y-%m-%d|%d %b %Y|%H') }}", json!([]));
    assert_eq!(text.len(), "2025-01-31|31 Jan 2025|23".len());
    assert!(text.starts_with("20"));
}

#[test]
fn templates_that_are_broken_or_endless_give_errors() {
    for source in [
        "{% for %}",
        "{{ messages[",
        "{% if x %}",
        "{{ 'a' | no_such_filter }}",
    ] {
        let error = ChatTemplate::new(source, Map::new()).and_then(|t| t.render(&chat(json!([]))));
        assert!(
            matches!(error, Err(Error::ChatTemplate { .. })),
            "{source}: {error:?}"
        );
    }
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}";
    let error = template(endless).render(&chat(json!([]))).expect_err("stops");
    assert!(matches!(error, Error::ChatTemplate { .. }));
    let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    assert!(template(deep).render(&chat(json!([]))).is_err());
}

#[test]
fn broken_text_files_are_named() {
    for (name, content) in [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", r#"{"chat_template": 3}"#),
        (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "default"}]}"#,
        ),
        ("tokenizer_config.json", r#"{"chat_template": "{% for %}"}"#),
        ("chat_template.jinja", "{% endfor %}"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", ""),
    ] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::copy(
            bundled_model().join("tokenizer.json"),
            dir.path().join("tokenizer.json"),
        )
        .expect("copies");
        std::fs::write(dir.path().join(name), content).expect("writable");
        let error = TextPipeline::from_dir(dir.path())
            .expect_err("is refused")
            .to_string();
        assert!(
            error.contains(name) && !error.contains('\n'),
            "{name} {content:?}: {error}"
        );
    }
}

#[test]
fn a_model_without_a_template_refuses_conversations() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::copy(
        bundled_model().join("tokenizer.json"),
        dir.path().join("tokenizer.json"),
    )
    .expect("copies");
    let pipeline = TextPipeline::from_dir(dir.path())
        .expect("loads")
        .expect("is there");
    assert!(matches!(
        pipeline.encode(&Prompt::Chat(chat(json!([])))),
        Err(Error::NoChatTemplate)
    ));
    assert!(
        TextPipeline::from_dir("/no/such/folder")
            .expect("no tokenizer is no error")
            .is_none()
    );
}

#[test]
fn variables_that_a_conversation_sets_itself_are_refused_among_the_others() {
    let template = ChatTemplate::new("{{ messages[0].content }}{{ x }}", Map::new()).expect("compiles");
    for name in ["messages", "tools", "add_generation_prompt"] {
        let mut chat = ChatPrompt::new(vec![json!({ "role": "user", "content": "q" })]);
        chat.variables.insert("x".into(), json!("y"));
        assert_eq!(template.render(&chat).expect("renders"), "qy");
        chat.variables.insert(name.into(), json!([]));
        let error = template.render(&chat).expect_err("would be ignored");
        assert!(error.to_string().contains(name), "{error}");
    }
}
